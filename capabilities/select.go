// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
)

// ErrNoMode is wrapped by Decision.Err: neither the requested mode nor a fallback can run.
var ErrNoMode = errors.New("no proxy mode can run on this node")

// Request says what the operator wants and what this binary has.
type Request struct {
	// Mode is tried first.
	Mode Mode
	// Fallback is tried next, in order. Empty: the process fails rather than run
	// in a mode that was not configured.
	Fallback []Mode
	// Available lists the modes compiled into this binary.
	Available []Mode
	// Failed has the errors of modes that failed a trial run.
	Failed map[Mode]error
}

// Reason is one sentence for the log, with the feature it is about, if any.
type Reason struct {
	Feature Feature `json:"feature,omitempty"`
	Text    string  `json:"text"`
}

// String returns the text.
func (r Reason) String() string { return r.Text }

// Decision is what Select made of a report.
type Decision struct {
	// Mode is the mode to run, or "" when Err is set.
	Mode Mode
	// Reasons say why Mode was chosen, and first why modes before it were not.
	Reasons []Reason
	// Degraded lists the limitations of Mode here, and required features whose
	// presence cannot be confirmed.
	Degraded []Reason
	// Err is set when no mode can run. It wraps ErrNoMode and says what is
	// missing, since which Linux version it exists, and what to do.
	Err error
}

// Select picks the first mode, of the requested one and its fallbacks, that can
// run according to report. It is pure.
//
// A required feature that is absent rules its mode out. One that is inconclusive
// does not, but is listed in Degraded with its error: a probe that failed for an
// unforeseen reason should not disable eBPF on a node where it would have worked, and
// if the feature is in fact missing, loading the programs fails with the true error. There is one exception: when the process was not
// permitted to ask, it will not be permitted to use the feature either, so that
// the mode is ruled out and the error names the capability that is missing.
func Select(report Report, request Request) Decision {
	if request.Mode == "" {
		return Decision{Err: fmt.Errorf("%w: no mode was requested", ErrNoMode)}
	}
	var rejected []Reason
	for _, mode := range candidates(request) {
		blockers, degraded := assess(report, mode, request.Available)
		if err := request.Failed[mode]; err != nil {
			blockers = append(blockers, Reason{Text: fmt.Sprintf("mode %s failed a trial run: %v", mode, err)})
		}
		if len(blockers) > 0 {
			rejected = append(rejected, blockers...)
			continue
		}
		return Decision{
			Mode:     mode,
			Reasons:  append(rejected, chosen(mode, request.Mode)),
			Degraded: degraded,
		}
	}
	return Decision{Reasons: rejected, Err: noModeError(rejected, request)}
}

// candidates lists each mode once, in the order to try.
func candidates(request Request) []Mode {
	var modes []Mode
	for _, mode := range append([]Mode{request.Mode}, request.Fallback...) {
		if !slices.Contains(modes, mode) {
			modes = append(modes, mode)
		}
	}
	return modes
}

func chosen(mode, requested Mode) Reason {
	if mode == requested {
		return Reason{Text: fmt.Sprintf("mode %s is configured, and none of its requirements is known to be missing", mode)}
	}
	return Reason{Text: fmt.Sprintf("mode %s is the first fallback of %s with no requirement known to be missing", mode, requested)}
}

func noModeError(rejected []Reason, request Request) error {
	texts := make([]string, 0, len(rejected)+1)
	for _, reason := range rejected {
		texts = append(texts, reason.Text)
	}
	if len(request.Fallback) == 0 {
		texts = append(texts, "no fallback is configured")
	}
	return fmt.Errorf("%w: %s", ErrNoMode, strings.Join(texts, "; "))
}

// assess says what keeps mode from running, and its limitations.
func assess(report Report, mode Mode, available []Mode) (blockers, degraded []Reason) {
	if !slices.Contains(available, mode) {
		return []Reason{{Text: fmt.Sprintf("this binary does not have mode %s", mode)}}, nil
	}
	for _, info := range catalogue {
		result, _ := report.Lookup(info.Feature)
		switch {
		case result.State == Yes:
		case slices.Contains(info.RequiredBy, mode):
			if result.State == No || errors.Is(result.Err, fs.ErrPermission) {
				blockers = append(blockers, Reason{info.Feature, missingText(mode, info, result)})
			} else {
				degraded = append(degraded, Reason{info.Feature, unconfirmedText(mode, info, result)})
			}
		case slices.Contains(info.OptionalFor, mode):
			if info.Substitutes != "" && report.Has(info.Substitutes) {
				continue
			}
			degraded = append(degraded, Reason{info.Feature, degradedText(info, result)})
		}
	}
	return blockers, degraded
}

func missingText(mode Mode, info Info, result Result) string {
	state := "is missing"
	if result.State == Inconclusive {
		state = "is not permitted"
	}
	return fmt.Sprintf("mode %s requires %s, which %s%s; %s", mode, named(info), state, because(result), remedy(info, result))
}

func unconfirmedText(mode Mode, info Info, result Result) string {
	return fmt.Sprintf("mode %s requires %s, which cannot be confirmed%s", mode, named(info), because(result))
}

func degradedText(info Info, result Result) string {
	state := "is missing"
	if result.State == Inconclusive {
		state = "cannot be confirmed"
	}
	return fmt.Sprintf("%s %s%s; effect: %s", named(info), state, because(result), info.Without)
}

// named is "set_retval (bpf_set_retval in sock_addr programs, since Linux 6.1)".
func named(info Info) string {
	since := ""
	if info.Since != "-" {
		since = ", since Linux " + info.Since
	}
	return fmt.Sprintf("%s (%s%s)", info.Feature, info.Description, since)
}

func because(result Result) string {
	if result.Err == nil {
		return ""
	}
	return ": " + strings.Join(strings.Fields(result.Err.Error()), " ")
}

func remedy(info Info, result Result) string {
	switch {
	case errors.Is(result.Err, fs.ErrPermission):
		return "run privileged"
	case info.Remedy != "":
		return info.Remedy
	}
	if info.Config == "" {
		return fmt.Sprintf("run Linux %s or newer", info.Since)
	}
	return fmt.Sprintf("run Linux %s or newer with %s", info.Since, info.Config)
}
