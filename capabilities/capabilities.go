// SPDX-License-Identifier: Apache-2.0

// Package capabilities probes what this node's kernel and tools support, and
// chooses a proxy mode by that, with reasons.
//
// Probe asks the kernel, Report holds the answers, Select decides. Every answer
// is one of three: yes, no, or inconclusive with the error that prevented an
// answer; the three are never folded into two, because "the kernel lacks it" and
// "this process was not allowed to ask" call for different actions. Probing
// leaves nothing behind: programs and maps are closed before the probe returns,
// nothing is attached, no device, qdisc, rule or namespace is created.
//
// The package stands alone: it imports no other package of this module.
package capabilities

import (
	"encoding/json"
	"fmt"
	"strings"
)

// State is the answer of one probe. The zero value is Inconclusive, so that an
// empty result does not read as an answer.
type State int

const (
	// Inconclusive means the question could not be answered; Result.Err says why.
	Inconclusive State = iota
	// Yes means the feature is there and usable by this process.
	Yes
	// No means the kernel or host does not have the feature.
	No
)

// String returns "yes", "no" or "inconclusive".
func (s State) String() string {
	switch s {
	case Yes:
		return "yes"
	case No:
		return "no"
	case Inconclusive:
		return "inconclusive"
	}
	return fmt.Sprintf("state(%d)", int(s))
}

// MarshalText makes a State its word in JSON, YAML and flags.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (s *State) UnmarshalText(text []byte) error {
	for _, known := range []State{Yes, No, Inconclusive} {
		if string(text) == known.String() {
			*s = known
			return nil
		}
	}
	return fmt.Errorf("state %q is none of yes, no, inconclusive", text)
}

// Feature is the stable id of one capability, such as "set_retval". A feature
// probed once per device has the device after a colon: "xdp_native:eth0".
type Feature string

// ForDevice returns the per-device form of f.
func (f Feature) ForDevice(device string) Feature {
	return f + ":" + Feature(device)
}

// Base returns f without its device.
func (f Feature) Base() Feature {
	base, _, _ := strings.Cut(string(f), ":")
	return Feature(base)
}

// Device returns the device of a per-device feature, or "".
func (f Feature) Device() string {
	_, device, _ := strings.Cut(string(f), ":")
	return device
}

// Result is the answer for one feature.
type Result struct {
	Feature Feature
	State   State
	// Err says why State is not Yes. It wraps what the kernel returned, so
	// callers can ask errors.Is(err, fs.ErrPermission).
	Err error
	// Detail is what else was learned: a path, a version, a list.
	Detail string
}

// Report holds the results of one Probe in catalogue order.
type Report struct {
	// Kernel is the running kernel's release.
	Kernel  string
	Results []Result
}

// Lookup returns the result for f.
func (r Report) Lookup(f Feature) (Result, bool) {
	for _, result := range r.Results {
		if result.Feature == f {
			return result, true
		}
	}
	return Result{Feature: f}, false
}

// State returns the state of f; a feature that was not probed is Inconclusive.
func (r Report) State(f Feature) State {
	result, _ := r.Lookup(f)
	return result.State
}

// Has reports whether f was found to be there.
func (r Report) Has(f Feature) bool { return r.State(f) == Yes }

// MarshalJSON writes the result together with its catalogue entry, so that the
// output can be read without this package.
func (r Result) MarshalJSON() ([]byte, error) {
	info, _ := Describe(r.Feature)
	out := struct {
		Feature     Feature `json:"feature"`
		State       State   `json:"state"`
		Error       string  `json:"error,omitempty"`
		Detail      string  `json:"detail,omitempty"`
		Description string  `json:"description,omitempty"`
		NeededBy    string  `json:"neededBy,omitempty"`
		RequiredBy  []Mode  `json:"requiredBy,omitempty"`
		Since       string  `json:"since,omitempty"`
		Without     string  `json:"without,omitempty"`
	}{
		Feature:     r.Feature,
		State:       r.State,
		Detail:      r.Detail,
		Description: info.Description,
		NeededBy:    info.NeededBy,
		RequiredBy:  info.RequiredBy,
		Since:       info.Since,
		Without:     info.Without,
	}
	if r.Err != nil {
		out.Error = r.Err.Error()
	}
	return json.Marshal(out)
}

// MarshalJSON writes {"kernel": …, "features": […]}.
func (r Report) MarshalJSON() ([]byte, error) {
	features := r.Results
	if features == nil {
		features = []Result{}
	}
	return json.Marshal(struct {
		Kernel   string   `json:"kernel,omitempty"`
		Features []Result `json:"features"`
	}{r.Kernel, features})
}
