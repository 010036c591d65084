// SPDX-License-Identifier: Apache-2.0

// Package preflight finds out what else acts on Service traffic of a node, before a proxy starts
// there: other proxies, CNIs, firewalls, meshes, encryption, BPF programs. Read reads facts, and
// changes nothing. Each detector is a pure function from facts to findings.
package preflight

import "fmt"

// Severity says what a finding means for a start.
type Severity int

// The severities.
const (
	Info    Severity = iota // nothing has to be done
	Remark                  // check it, or set something
	Blocker                 // do not start before it is resolved
)

var severities = []string{"info", "remark", "blocker"}

func (s Severity) String() string { return severities[s] }

// MarshalText makes a Severity its word in JSON.
func (s Severity) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (s *Severity) UnmarshalText(text []byte) error {
	for i, name := range severities {
		if name == string(text) {
			*s = Severity(i)
			return nil
		}
	}
	return fmt.Errorf("severity %q is none of %q", text, severities)
}

// Finding is something on this node that acts on Service traffic.
type Finding struct {
	Severity Severity `json:"severity"`
	// Subject is the kind of thing: kube-proxy, cni, firewall, …
	Subject string `json:"subject"`
	// What was found, and by which signs.
	What string `json:"what"`
	// Means is the effect on Services, or of Services on it.
	Means string `json:"means"`
	// Set is what to set or to do; empty for nothing.
	Set string `json:"set,omitempty"`
}

// detectors in the order of their findings. Those of programs matter in mode ebpf alone, which
// translates sockets and packets before netfilter sees them.
var detectors = []struct {
	programs bool
	detect   func(*Facts) []Finding
}{
	{false, ownPrograms}, {false, kubeProxies}, {false, proxyLeftovers}, {false, ports}, {false, cnis},
	{true, nodeLocalDNS}, {true, meshes}, {true, firewalls}, {true, beforeDNAT}, {true, encryption}, {true, programs},
}

// Findings are those of all detectors.
func Findings(f *Facts) []Finding {
	list := []Finding{}
	for _, d := range detectors {
		if !d.programs || f.Programmable {
			list = append(list, d.detect(f)...)
		}
	}
	return list
}

// Worst is the highest severity of a list.
func Worst(list []Finding) (worst Severity) {
	for i := range list {
		worst = max(worst, list[i].Severity)
	}
	return worst
}
