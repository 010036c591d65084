// SPDX-License-Identifier: Apache-2.0

package scenarios

import (
	"embed"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

//go:embed *.txtar
var files embed.FS

// All returns the scenarios of this package, sorted by name.
func All() ([]*Scenario, error) {
	names, err := fs.Glob(files, "*.txtar")
	if err != nil {
		return nil, err
	}
	all := make([]*Scenario, 0, len(names))
	for _, name := range names {
		text, err := files.ReadFile(name)
		if err != nil {
			return nil, err
		}
		s, err := Parse(name, text)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

// Scenario is one file. Format writes it.
type Scenario struct {
	Name       string // of the file, without .txtar
	Title      string
	Notes      []string // further lines below the title
	Statements []string // numbers of the statements that it tests

	// The cluster, in the order of the address plan.
	Nodes   []Node
	Pods    []Pod
	Clients []string

	Steps []Step
	Files []File
}

// Node of a scenario's cluster, and its zone; empty for none.
type Node struct{ Name, Zone string }

// Pod of a scenario's cluster, and its node.
type Pod struct{ Name, Node string }

// File is YAML or an expected text.
type File struct {
	Name string
	Data string
}

// Step is one line of the script.
type Step struct {
	Line int // in the file; 0 if it is not from a file
	// Above are the comments and empty lines before it.
	Above   []string
	Command Command
}

// Command is one of the types below.
type Command interface {
	words(*Scenario) []string
}

type (
	// Configure changes settings of all proxies.
	Configure struct{ Settings []Setting }
	// Apply creates or updates the objects of a file.
	Apply struct{ File string }
	// Delete removes a Service or an EndpointSlice.
	Delete struct{ Kind, Namespace, Name string }
	// Announce routes a prefix to nodes, or to none.
	Announce struct {
		Prefix netip.Prefix
		Nodes  []string
	}
	// Address adds an address to a node, or removes it.
	Address struct {
		Node string
		Addr netip.Addr
		Gone bool
	}
	// Override is what an operator says of a backend on a node; ActiveState for nothing any more.
	Override struct {
		Node string
		proxier.BackendOverride
	}
	// Restart restarts a node's proxy.
	Restart struct{ Node string }
	// Table compares a node's table with a file.
	Table struct{ Node, File string }
	// Changes compares what changed in a node's table with a file.
	Changes struct{ Node, File string }
	// HealthCheck compares the answer to health checks of load balancers.
	HealthCheck struct {
		Node, Namespace, Name string
		None                  bool
		Ready                 [proxier.Families]int
	}
	// Problem expects that a problem was reported.
	Problem struct{ Kind, Namespace, Name, Field, Reason string }
	// Reach makes calls.
	Reach struct {
		Call
		Expect Expectation
	}
	// Flow is a long-lived connection.
	Flow struct {
		Label  string
		Call   *Call // nil: send another request
		Expect Expectation
	}
)

// Setting of Configure.
type Setting struct{ Key, Value string }

// Call has the caller and the target of a call.
type Call struct {
	From string // node, pod or client
	To   Target
	Via  string // node; empty for the usual route
}

// Target of a call.
type Target struct {
	// Name of a node, pod or client, and which of its addresses; or Addr.
	Name     string
	Family   proxier.Family
	Addr     netip.Addr
	Port     uint16
	Protocol proxier.Protocol
}

// Outcome is the expected outcome of a call.
type Outcome uint8

// The outcomes.
const (
	Backends Outcome = iota
	Refused
	NoAnswer
	Passes
	Same // the backend that answered last; only for a Flow
)

var outcomes = [...]string{"backends", "refused", "no-answer", "passes", "same"}

func (o Outcome) String() string { return outcomes[o] }

// Expectation of a call.
type Expectation struct {
	Outcome  Outcome
	Backends []string // names of nodes and pods
	Source   string   // a node, SourceClient or SourceAny; empty for the same
	Sticky   bool
	Label    string // of Sticky
}

// Words for sources besides names of nodes.
const (
	SourceClient = "client"
	SourceAny    = "any"
)

// File returns the text of a file.
func (s *Scenario) File(name string) (string, bool) {
	for i := range s.Files {
		if s.Files[i].Name == name {
			return s.Files[i].Data, true
		}
	}
	return "", false
}

func (s *Scenario) node(name string) int {
	return slices.IndexFunc(s.Nodes, func(n Node) bool { return n.Name == name })
}

func (s *Scenario) pod(name string) int {
	return slices.IndexFunc(s.Pods, func(p Pod) bool { return p.Name == name })
}

// NodeOf is the node on which a pod or a node's own process runs; empty for a
// client.
func (s *Scenario) NodeOf(name string) string {
	if i := s.pod(name); i >= 0 {
		return s.Pods[i].Node
	}
	if s.node(name) >= 0 {
		return name
	}
	return ""
}

// kindOf returns "node", "pod" or "client" for a name; empty if there is none.
func (s *Scenario) kindOf(name string) string {
	switch {
	case s.pod(name) >= 0:
		return "pod"
	case s.node(name) >= 0:
		return "host"
	case slices.Contains(s.Clients, name):
		return "client"
	}
	return ""
}

// podNumber counts the pods of one node, from 1.
func (s *Scenario) podNumber(name string) int {
	i := s.pod(name)
	n := 0
	for _, p := range s.Pods[:i+1] {
		if p.Node == s.Pods[i].Node {
			n++
		}
	}
	return n
}

// Addr is the address that a node, pod or client has by the plan; the zero
// Addr for an unknown name.
func (s *Scenario) Addr(name string, family proxier.Family) netip.Addr {
	plan := func(v4, v6 string, args ...any) netip.Addr {
		if family == proxier.IPv6 {
			v4 = v6
		}
		return netip.MustParseAddr(fmt.Sprintf(v4, args...))
	}
	switch s.kindOf(name) {
	case "host":
		return plan("172.18.0.%d", "fd00:18::%x", s.node(name)+1)
	case "pod":
		return plan("10.244.%d.%d", "fd00:10:244:%x::%x", s.node(s.NodeOf(name))+1, s.podNumber(name))
	case "client":
		return plan("198.51.100.%d", "2001:db8:51:100::%x", slices.Index(s.Clients, name)+1)
	}
	return netip.Addr{}
}

// PodCIDR is the range of a node's pods.
func (s *Scenario) PodCIDR(node string, family proxier.Family) netip.Prefix {
	i := s.node(node) + 1
	if family == proxier.IPv4 {
		return netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", i))
	}
	return netip.MustParsePrefix(fmt.Sprintf("fd00:10:244:%x::/64", i))
}

// gateway is the address of a node at its end of pod links.
func (s *Scenario) gateway(node string, family proxier.Family) netip.Addr {
	i := s.node(node) + 1
	if family == proxier.IPv4 {
		return netip.MustParseAddr(fmt.Sprintf("10.244.%d.254", i))
	}
	return netip.MustParseAddr(fmt.Sprintf("fd00:10:244:%x::ffff", i))
}

// Resolve returns the address of a target.
func (s *Scenario) Resolve(t Target) netip.AddrPort {
	if t.Name != "" {
		return netip.AddrPortFrom(s.Addr(t.Name, t.Family), t.Port)
	}
	return netip.AddrPortFrom(t.Addr, t.Port)
}

func (s *Scenario) errorf(line int, format string, args ...any) error {
	return fmt.Errorf("%s.txtar:%d: %w", s.Name, line, fmt.Errorf(format, args...))
}

// String returns the target as in a script.
func (t Target) String() string {
	var b strings.Builder
	switch {
	case t.Name != "" && t.Family == proxier.IPv6:
		fmt.Fprintf(&b, "[%s]:%d", t.Name, t.Port)
	case t.Name != "":
		fmt.Fprintf(&b, "%s:%d", t.Name, t.Port)
	default:
		b.WriteString(netip.AddrPortFrom(t.Addr, t.Port).String())
	}
	if t.Protocol != proxier.TCP {
		b.WriteByte('/')
		b.WriteString(strings.ToLower(t.Protocol.String()))
	}
	return b.String()
}
