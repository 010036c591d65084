// SPDX-License-Identifier: Apache-2.0

package scenarios

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/tools/txtar"

	"github.com/tandem-proxy/tandem/proxier"
)

// maxIndex is the highest number of a node, pod or client in the lab's plan.
const maxIndex = 250

var (
	nameSyntax      = regexp.MustCompile(`^[a-z][a-z0-9-]{0,30}$`)
	statementSyntax = regexp.MustCompile(`^[SC][0-9]{2,3}$`)
	labelSyntax     = regexp.MustCompile(`^[a-z0-9-]+$`)
)

// reserved words cannot be names.
var reserved = []string{SourceClient, SourceAny, "host", "pod", "none"}

type parser struct {
	*Scenario
	line   int
	events bool            // the cluster is complete
	flows  map[string]bool // their labels
	used   map[string]bool // files
}

// Parse reads a scenario. Unknown input is an error, which names file and line.
func Parse(file string, text []byte) (*Scenario, error) {
	p := &parser{
		Scenario: &Scenario{Name: strings.TrimSuffix(file, ".txtar")},
		flows:    map[string]bool{}, used: map[string]bool{},
	}
	a := txtar.Parse(text)
	for _, f := range a.Files {
		if _, twice := p.File(f.Name); twice {
			return nil, p.errorf(1, "file %s is listed twice", f.Name)
		}
		p.Files = append(p.Files, File{f.Name, string(f.Data)})
	}
	if err := p.script(string(a.Comment)); err != nil {
		return nil, p.errorf(p.line, "%w", err)
	}
	for _, f := range p.Files {
		if !p.used[f.Name] {
			return nil, p.errorf(p.line, "file %s is not used", f.Name)
		}
	}
	return p.Scenario, nil
}

func (p *parser) script(text string) error {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	rest, err := p.head(lines)
	if err != nil {
		return err
	}
	var above []string
	for _, l := range rest {
		p.line++
		if l = strings.TrimSpace(l); l == "" || l[0] == '#' {
			above = append(above, l)
			continue
		}
		words := strings.Fields(l)
		declared, err := p.declare(words)
		if err != nil {
			return err
		}
		if declared {
			if len(above) > 0 {
				return errors.New("no comments or empty lines between the parts of the cluster")
			}
			continue
		}
		p.events = true
		c, err := p.command(words[0], words[1:])
		if err != nil {
			return err
		}
		p.Steps = append(p.Steps, Step{Line: p.line, Above: above, Command: c})
		above = nil
	}
	if len(above) > 0 {
		return errors.New("comment without a command")
	}
	return nil
}

// head reads title, notes and statements.
func (p *parser) head(lines []string) (rest []string, err error) {
	var head []string
	for _, l := range lines {
		p.line++
		if l == "" {
			break
		}
		text, ok := strings.CutPrefix(l, "#")
		if !ok {
			return nil, errors.New("a scenario begins with its title as a comment, ended by an empty line")
		}
		head = append(head, strings.TrimSpace(text))
	}
	if len(head) < 2 || head[0] == "" {
		return nil, errors.New("want a title and a line of statements as comments")
	}
	statements, ok := strings.CutPrefix(head[len(head)-1], "Statements:")
	if !ok {
		return nil, errors.New(`the last line of the first comment is not "# Statements: ..."`)
	}
	p.Title, p.Statements = head[0], strings.Fields(statements)
	if len(head) > 2 {
		p.Notes = head[1 : len(head)-1]
	}
	for i, s := range p.Statements {
		if !statementSyntax.MatchString(s) {
			return nil, fmt.Errorf("%q is not the number of a statement", s)
		}
		if slices.Contains(p.Statements[:i], s) {
			return nil, fmt.Errorf("statement %s is listed twice", s)
		}
	}
	return lines[p.line:], nil
}

// declare reads a part of the cluster.
func (p *parser) declare(words []string) (bool, error) {
	kind := words[0]
	if kind != "node" && kind != "pod" && kind != "client" {
		return false, nil
	}
	if p.events {
		return false, fmt.Errorf("%s after an event", kind)
	}
	if len(words) < 2 {
		return false, fmt.Errorf("%s: want a name", kind)
	}
	name, args := words[1], words[2:]
	if !nameSyntax.MatchString(name) || slices.Contains(reserved, name) {
		return false, fmt.Errorf("%q cannot be a name", name)
	}
	if p.kindOf(name) != "" {
		return false, fmt.Errorf("%s is declared twice", name)
	}
	number := 0
	switch {
	case kind == "node":
		if len(p.Pods)+len(p.Clients) > 0 {
			return false, errors.New("nodes come before pods and clients")
		}
		n := Node{Name: name}
		if len(args) == 1 && strings.HasPrefix(args[0], "zone=") {
			n.Zone, args = args[0][len("zone="):], nil
		}
		p.Nodes = append(p.Nodes, n)
		number = len(p.Nodes)
	case kind == "pod":
		if len(args) != 1 || p.node(args[0]) < 0 {
			return false, fmt.Errorf("pod %s: want its node", name)
		}
		if len(p.Clients) > 0 {
			return false, errors.New("pods come before clients")
		}
		p.Pods, args = append(p.Pods, Pod{name, args[0]}), nil
		number = p.podNumber(name)
	default:
		p.Clients = append(p.Clients, name)
		number = len(p.Clients)
	}
	if len(args) > 0 {
		return false, fmt.Errorf("%s %s: cannot read %q", kind, name, strings.Join(args, " "))
	}
	if number > maxIndex {
		return false, fmt.Errorf("%s %s: the address plan ends at %d", kind, name, maxIndex)
	}
	return true, nil
}

func (p *parser) command(name string, args []string) (Command, error) {
	switch name {
	case "config":
		return p.configure(args)
	case "apply":
		if len(args) != 1 {
			return nil, errors.New("apply: want a file")
		}
		p.used[args[0]] = true
		_, err := p.Objects(args[0])
		return Apply{args[0]}, err
	case "delete":
		if len(args) != 2 || args[0] != "service" && args[0] != "endpointslice" && args[0] != "pod" {
			return nil, errors.New("delete: want service, endpointslice or pod, and namespace/name")
		}
		ns, name, err := namespaced(args[1])
		return Delete{args[0], ns, name}, err
	case "announce":
		if len(args) < 1 {
			return nil, errors.New("announce: want a prefix, and nodes")
		}
		prefix, err := netip.ParsePrefix(args[0])
		if err != nil || prefix != prefix.Masked() {
			return nil, fmt.Errorf("announce: %q is not a prefix", args[0])
		}
		c := Announce{Prefix: prefix, Nodes: args[1:]}
		for _, n := range c.Nodes {
			if err := p.knownNode(n); err != nil {
				return nil, err
			}
		}
		return c, nil
	case "address":
		if len(args) != 3 || args[0] != "add" && args[0] != "del" {
			return nil, errors.New("address: want add or del, a node and an address")
		}
		addr, err := netip.ParseAddr(args[2])
		return Address{Node: args[1], Addr: addr, Gone: args[0] == "del"}, errors.Join(err, p.knownNode(args[1]))
	case "backend":
		return p.override(args)
	case "restart":
		if len(args) != 1 {
			return nil, errors.New("restart: want a node")
		}
		return Restart{args[0]}, p.knownNode(args[0])
	case "table", "changes":
		if len(args) != 2 {
			return nil, fmt.Errorf("%s: want a node and a file", name)
		}
		if _, ok := p.File(args[1]); !ok {
			return nil, fmt.Errorf("%s: there is no file %s", name, args[1])
		}
		if p.used[args[1]] {
			return nil, fmt.Errorf("%s: file %s is already used", name, args[1])
		}
		p.used[args[1]] = true
		if name == "table" {
			return Table{args[0], args[1]}, p.knownNode(args[0])
		}
		return Changes{args[0], args[1]}, p.knownNode(args[0])
	case "healthcheck":
		return p.healthCheck(args)
	case "problem":
		if len(args) != 4 {
			return nil, errors.New("problem: want kind, namespace/name, field and reason")
		}
		ns, name, err := namespaced(args[1])
		c := Problem{Kind: args[0], Namespace: ns, Name: name, Field: args[2], Reason: args[3]}
		if c.Field == "-" {
			c.Field = ""
		}
		return c, err
	case "reach":
		return p.reach(args)
	case "flow":
		return p.flow(args)
	}
	return nil, fmt.Errorf("unknown command %q", name)
}

func (p *parser) knownNode(name string) error {
	if p.node(name) < 0 {
		return fmt.Errorf("there is no node %s", name)
	}
	return nil
}

// overrides are the words for states.
var overrides = map[proxier.BackendState]string{proxier.ActiveState: "restore", proxier.MaintenanceState: "drain", proxier.QuarantinedState: "quarantine"}

func (p *parser) override(args []string) (c Override, err error) {
	if len(args) != 3 && len(args) != 4 {
		return c, errors.New("backend: want drain, quarantine or restore, a node, and an address with or without a port")
	}
	known := false
	for state, word := range overrides {
		if word == args[0] {
			c.State, known = state, true
		}
	}
	if !known {
		return c, fmt.Errorf("backend: %q is not drain, quarantine or restore", args[0])
	}
	c.Node = args[1]
	if at, err := netip.ParseAddrPort(args[2]); err == nil {
		c.Addr, c.Port = at.Addr(), at.Port()
	} else if c.Addr, err = netip.ParseAddr(args[2]); err != nil {
		return c, err
	}
	if len(args) == 4 {
		if c.Service.Namespace, c.Service.Name, err = namespaced(args[3]); err != nil {
			return c, err
		}
	}
	return c, p.knownNode(c.Node)
}

func namespaced(text string) (namespace, name string, err error) {
	namespace, name, ok := strings.Cut(text, "/")
	if !ok || namespace == "" || name == "" {
		return "", "", fmt.Errorf("%q is not namespace/name", text)
	}
	return namespace, name, nil
}

func (p *parser) configure(args []string) (Command, error) {
	if len(args) == 0 {
		return nil, errors.New("config: want settings")
	}
	var c Configure
	scratch := DefaultConfig()
	for _, a := range args {
		key, value, ok := strings.Cut(a, "=")
		if !ok {
			return nil, fmt.Errorf("config: %q is not a setting", a)
		}
		s := Setting{key, value}
		if err := scratch.Set(s); err != nil {
			return nil, err
		}
		c.Settings = append(c.Settings, s)
	}
	return c, nil
}

func (p *parser) healthCheck(args []string) (Command, error) {
	if len(args) < 3 {
		return nil, errors.New("healthcheck: want a node, namespace/name, and counts or none")
	}
	ns, name, err := namespaced(args[1])
	if err := errors.Join(err, p.knownNode(args[0])); err != nil {
		return nil, err
	}
	c := HealthCheck{Node: args[0], Namespace: ns, Name: name}
	if len(args) == 3 && args[2] == "none" {
		c.None = true
		return c, nil
	}
	for _, a := range args[2:] {
		key, value, _ := strings.Cut(a, "=")
		n, err := strconv.ParseUint(value, 10, 16)
		switch {
		case err != nil:
			return nil, fmt.Errorf("healthcheck: %q is not a count", a)
		case key == "ipv4":
			c.Ready[proxier.IPv4] = int(n)
		case key == "ipv6":
			c.Ready[proxier.IPv6] = int(n)
		default:
			return nil, fmt.Errorf("healthcheck: unknown word %q", a)
		}
	}
	return c, nil
}

func (p *parser) reach(args []string) (Command, error) {
	call, rest, err := p.call(args)
	if err != nil {
		return nil, fmt.Errorf("reach: %w", err)
	}
	e, err := p.expectation(rest)
	if err != nil {
		return nil, fmt.Errorf("reach: %w", err)
	}
	if e.Outcome == Same {
		return nil, errors.New("reach: same is only for flows")
	}
	return Reach{Call: *call, Expect: e}, nil
}

func (p *parser) flow(args []string) (Command, error) {
	if len(args) == 0 || !labelSyntax.MatchString(args[0]) {
		return nil, errors.New("flow: want a label")
	}
	c, rest := Flow{Label: args[0]}, args[1:]
	known := p.flows[c.Label]
	if len(rest) > 0 && rest[0] != ":" {
		call, r, err := p.call(rest)
		if err != nil {
			return nil, fmt.Errorf("flow: %w", err)
		}
		if known {
			return nil, fmt.Errorf("flow: label %s is already used", c.Label)
		}
		c.Call, rest = call, r
		p.flows[c.Label] = true
	} else if !known {
		return nil, fmt.Errorf("flow: there is no label %s", c.Label)
	}
	e, err := p.expectation(rest)
	switch {
	case err != nil:
		return nil, fmt.Errorf("flow: %w", err)
	case e.Sticky:
		return nil, errors.New("flow: sticky is only for reach")
	case c.Call != nil && e.Outcome != Backends:
		return nil, errors.New("flow: its first call needs backends")
	}
	c.Expect = e
	return c, nil
}

// call reads up to the colon.
func (p *parser) call(args []string) (*Call, []string, error) {
	if len(args) < 4 || args[2] != "->" {
		return nil, nil, errors.New("want pod, client or host, its name, an arrow and a target")
	}
	c := &Call{From: args[1]}
	if args[0] == "" || p.kindOf(c.From) != args[0] {
		return nil, nil, fmt.Errorf("there is no %s %s", args[0], args[1])
	}
	var err error
	if c.To, err = p.target(args[3]); err != nil {
		return nil, nil, err
	}
	rest := args[4:]
	if len(rest) >= 2 && rest[0] == "via" {
		c.Via, rest = rest[1], rest[2:]
		if args[0] != "client" {
			return nil, nil, errors.New("via is only for clients")
		}
		if c.To.Name != "" {
			return nil, nil, errors.New("via is only for addresses that no node or pod has")
		}
		if err := p.knownNode(c.Via); err != nil {
			return nil, nil, err
		}
	}
	return c, rest, nil
}

func (p *parser) target(text string) (t Target, err error) {
	at, proto, has := strings.Cut(text, "/")
	t.Protocol = proxier.TCP
	switch {
	case !has:
	case proto == "udp":
		t.Protocol = proxier.UDP
	case proto == "sctp":
		t.Protocol = proxier.SCTP
	default:
		return t, fmt.Errorf("unknown protocol in %q", text)
	}
	if ap, err := netip.ParseAddrPort(at); err == nil {
		if ap.Addr().Is4In6() || ap.Addr().Zone() != "" || ap.Port() == 0 {
			return t, fmt.Errorf("%q is not a target", text)
		}
		t.Addr, t.Port = ap.Addr(), ap.Port()
		return t, nil
	}
	i := strings.LastIndexByte(at, ':')
	if i < 0 {
		return t, fmt.Errorf("%q is not a target", text)
	}
	t.Name = at[:i]
	if strings.HasPrefix(t.Name, "[") && strings.HasSuffix(t.Name, "]") {
		t.Name, t.Family = t.Name[1:len(t.Name)-1], proxier.IPv6
	}
	port, err := strconv.ParseUint(at[i+1:], 10, 16)
	if err != nil || port == 0 {
		return t, fmt.Errorf("%q is not a target", text)
	}
	t.Port = uint16(port)
	if p.kindOf(t.Name) == "" {
		return t, fmt.Errorf("nothing has the name %s", t.Name)
	}
	return t, nil
}

// expectation reads from the colon on.
func (p *parser) expectation(args []string) (e Expectation, err error) {
	if len(args) < 2 || args[0] != ":" {
		return e, errors.New("want a colon and an expectation")
	}
	o := slices.Index(outcomes[:], args[1])
	if o < 0 {
		return e, fmt.Errorf("unknown expectation %q", args[1])
	}
	e.Outcome = Outcome(o)
	args = args[2:]
	if e.Outcome == Backends {
		if len(args) == 0 {
			return e, errors.New("backends: want names")
		}
		e.Backends, args = strings.Split(args[0], ","), args[1:]
		for i, name := range e.Backends {
			if k := p.kindOf(name); k != "pod" && k != "host" {
				return e, fmt.Errorf("backends: there is no pod or node %q", name)
			}
			if slices.Contains(e.Backends[:i], name) {
				return e, fmt.Errorf("backends: %s is listed twice", name)
			}
		}
	}
	if (e.Outcome == Backends || e.Outcome == Same) && len(args) >= 2 && args[0] == "source" {
		e.Source, args = args[1], args[2:]
		if e.Source != SourceAny && e.Source != SourceClient && p.node(e.Source) < 0 {
			return e, fmt.Errorf("source: there is no node %s", e.Source)
		}
	}
	if e.Outcome == Backends && len(args) >= 1 {
		label, labelled := strings.CutPrefix(args[0], "sticky=")
		if args[0] == "sticky" || labelled && labelSyntax.MatchString(label) {
			e.Sticky, args = true, args[1:]
			if labelled {
				e.Label = label
			}
		}
	}
	if len(args) > 0 {
		return e, fmt.Errorf("cannot read %q", strings.Join(args, " "))
	}
	return e, nil
}
