// SPDX-License-Identifier: Apache-2.0

package differential

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/netfilter"
	"github.com/tandem-proxy/tandem/test/oracle"
)

// Node is a node that upstream serves. It is for one goroutine.
type Node struct {
	// Valid returns the Services with an API server's defaults, or false if it would not store
	// the objects; about such clusters Check says nothing.
	Valid func(*oracle.Cluster) ([]*v1.Service, bool)

	upstream *Upstream
	cluster  *oracle.Cluster
	invalid  bool // no API server stores these objects
	world    world
	tables   [proxier.Families]*netfilter.Tables
	now      time.Time
}

// Node returns another node, for clusters of oracle.Admitted.
func (u *Upstream) Node() *Node {
	return &Node{Valid: (*oracle.Cluster).Stored, upstream: u, now: time.Unix(1e9, 0)}
}

// learn writes the rules for a cluster.
func (n *Node) learn(p *process, c *oracle.Cluster) error {
	n.cluster = nil
	services, ok := n.Valid(c)
	if n.invalid = !ok; n.invalid {
		n.cluster, p.learned = c, c
		return nil
	}
	n.world = worldOf(c, services)
	a, err := p.ask(question{World: &n.world})
	if err != nil {
		return err
	}
	p.learned = c
	for f := range proxier.Families {
		rules := a.Rules[ipFamilies[f]]
		if n.upstream.Spoil != nil {
			rules = n.upstream.Spoil(rules)
		}
		n.tables[f] = netfilter.New(f)
		n.tables[f].Now = func() time.Time { return n.now }
		if err := n.tables[f].Restore([]byte(rules)); err != nil {
			return fmt.Errorf("upstream's rules: %w:\n%s", err, rules)
		}
	}
	n.cluster = c
	return n.checkHealth(a.Checks)
}

// worldOf returns what upstream knows of a cluster, with the label selectors of its informers.
func worldOf(c *oracle.Cluster, services []*v1.Service) world {
	w := world{
		Node: c.NodeName, Zone: c.Facts.Zone, PodInterface: c.Facts.Pods.Interface, PodInterfacePrefix: c.Facts.Pods.InterfacePrefix,
		LocalhostNodePorts: c.Policy.NodePorts.Loopback, MasqueradeAll: c.Policy.MasqueradeAll, IgnoreExternalIPs: c.Policy.IgnoreExternalIPs,
	}
	for _, s := range services {
		if _, anothers := s.Labels[proxier.LabelServiceProxyName]; !anothers && s.Spec.ClusterIP != v1.ClusterIPNone {
			w.Services = append(w.Services, s)
		}
	}
	for _, s := range c.Slices {
		if _, headless := s.Labels[proxier.LabelHeadless]; !headless {
			w.Slices = append(w.Slices, s)
		}
	}
	loopback := []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}
	for _, a := range slices.Concat(c.Facts.LocalAddrs, loopback) {
		if text := a.String(); !slices.Contains(w.Addresses, text) {
			w.Addresses = append(w.Addresses, text)
		}
	}
	if w.PodInterface == "" {
		for _, p := range c.Facts.Pods.CIDRs {
			w.PodCIDRs = append(w.PodCIDRs, p.String())
		}
	}
	// The keywords of nodePortAddresses are replaced before a proxier gets them.
	for _, a := range c.Facts.NodeIPs {
		if a.IsValid() {
			w.NodeIPs = append(w.NodeIPs, a.String())
			if c.Policy.NodePorts.Primary {
				w.NodePortAddresses = append(w.NodePortAddresses, netip.PrefixFrom(a, a.BitLen()).String())
			}
		}
	}
	if c.Policy.NodePorts.Localhost {
		w.NodePortAddresses = append(w.NodePortAddresses, "127.0.0.0/8", "::1/128")
	}
	if c.Policy.NodePorts.All {
		w.NodePortAddresses = append(w.NodePortAddresses, "0.0.0.0/0", "::/0")
	}
	for _, p := range c.Policy.NodePorts.CIDRs {
		w.NodePortAddresses = append(w.NodePortAddresses, p.String())
	}
	return w
}

// hasFamily reports whether a Service has a ClusterIP of a family.
func hasFamily(s *v1.Service, f proxier.Family) bool {
	return slices.ContainsFunc(s.Spec.ClusterIPs, func(text string) bool {
		a, err := netip.ParseAddr(text)
		return err == nil && proxier.FamilyOf(a) == f
	})
}

// checkHealth compares the health checks of Services, in the families that they have: Tandem
// answers them in the other one, too.
func (n *Node) checkHealth(checks map[v1.IPFamily]map[string]check) error {
	want := n.cluster.HealthChecks()
	for f := range proxier.Families {
		for _, s := range n.world.Services {
			name := s.Namespace + "/" + s.Name
			theirs, ours := checks[ipFamilies[f]][name], check{}
			if h, there := want[types.NamespacedName{Namespace: s.Namespace, Name: s.Name}]; there && hasFamily(s, f) {
				ours = check{h.Port, h.Ready[f]}
			}
			if theirs == ours {
				continue
			}
			d := healthDifference{n.cluster, s, f, ours, theirs}
			if !n.upstream.meantHealth(&d) {
				return fmt.Errorf("health check of %s, %s: upstream has port %d with %d endpoints here, Tandem port %d with %d", name, f, theirs.Port, theirs.Local, ours.Port, ours.Local)
			}
		}
	}
	return nil
}

// packetOf returns the packet of a flow; false if rules of Services decide nothing about it.
func packetOf(c *oracle.Cluster, flow proxier.Flow, want *oracle.Answer) (p netfilter.Packet, ok bool) {
	local := func(a netip.Addr) bool { return a.IsLoopback() || slices.Contains(c.Facts.LocalAddrs, a) }
	device := flow.Device
	src, dst := flow.Source.Addr(), flow.Destination.Addr()
	switch {
	case local(src) && slices.Contains(c.Facts.Uplinks, flow.Device):
		return p, false // the kernel drops it: no other machine has this address
	case local(src):
		if device = ""; want.Origin != proxier.FromHost {
			return p, false // no packet of this host comes in by a device of pods
		}
	case device == "":
		device = "eth0" // this host has no such address
	}
	switch {
	case dst.IsUnspecified():
		return p, false // no packet goes there
	case dst.IsLoopback() && (device != "" || !src.IsLoopback() && want.Outcome != proxier.Forward):
		return p, false // the kernel or rules about loopback addresses drop it
	case want.Kind == proxier.ClusterIP && want.Outcome != proxier.Forward && local(dst):
		return p, false // a device has the address
	case want.Outcome == proxier.Forward && slices.ContainsFunc(c.Frontends(), func(f oracle.Frontend) bool {
		return f.Owner.Protocol == flow.Protocol && slices.Contains(want.Backends, f.Addr)
	}):
		return p, false // filters see a packet to a frontend after translation
	}
	return netfilter.Packet{Src: flow.Source, Dst: flow.Destination, Protocol: flow.Protocol, In: device, Out: "eth0", Local: local}, true
}

// acquire returns a process that knows the cluster.
func (n *Node) acquire(c *oracle.Cluster) (*process, error) {
	process, err := n.upstream.acquire(c)
	if err == nil && (n.cluster != c || process.learned != c) {
		if err = n.learn(process, c); err != nil {
			n.upstream.release(process)
		}
	}
	return process, err
}

// Check compares what upstream's rules do with a flow with the answer.
func (n *Node) Check(c *oracle.Cluster, flow proxier.Flow, want *oracle.Answer) error {
	p, ok := packetOf(c, flow, want)
	if !ok {
		n.upstream.count("no packet that rules of Services decide about")
		return nil
	}
	process, err := n.acquire(c)
	if err != nil {
		return err
	}
	defer n.upstream.release(process)
	if n.invalid {
		return nil
	}
	tables := n.tables[proxier.FamilyOf(flow.Destination.Addr())]
	branches := tables.Branches(p)
	ours, theirs := expected(&p, want), handlingOf(branches)
	if err := n.checkTracer(process, &p, branches, theirs); err != nil {
		return err
	}
	if !ours.equal(theirs) {
		if n.upstream.meant(&difference{c, flow, &p, want, ours, theirs}) {
			return nil
		}
		return fmt.Errorf("handled by Tandem: %s\nby upstream: %s", ours, describe(branches))
	}
	n.upstream.count("same: " + want.Outcome.String())
	// Of two Services that claim the address, upstream may lead to the other one.
	if want.Outcome == proxier.Forward && len(want.Rivals) == 0 {
		return n.checkAffinity(tables, p, want.Affinity, theirs)
	}
	return nil
}

// checkAffinity sees whom a client reaches after its first connection.
func (n *Node) checkAffinity(tables *netfilter.Tables, p netfilter.Packet, affinity time.Duration, all handling) error {
	first := tables.Trace(p).To
	only := func() bool {
		h := handlingOf(tables.Branches(p))
		for r := range h {
			if r.to != first {
				return false
			}
		}
		return true
	}
	free := func() bool { return handlingOf(tables.Branches(p)).equal(all) }
	if affinity == 0 {
		if !free() {
			return fmt.Errorf("upstream keeps the client at %s, Tandem does not", first)
		}
		return nil
	}
	n.now = n.now.Add(affinity)
	if !only() {
		return fmt.Errorf("the client stays at %s for %v, but not upstream", first, affinity)
	}
	n.now = n.now.Add(time.Second)
	if !free() {
		return fmt.Errorf("upstream keeps the client at %s for longer than %v", first, affinity)
	}
	return nil
}

// checkTracer compares with upstream's tracer on the same rules.
func (n *Node) checkTracer(process *process, p *netfilter.Packet, branches []netfilter.Branch, h handling) error {
	// It knows of no devices, nor that some chains do not see what this host sends.
	if n.world.PodInterface != "" || p.In == "" || n.upstream.Spoil != nil {
		return nil
	}
	a, err := process.ask(question{Packet: &packet{p.Src.Addr().String(), p.Dst.Addr().String(), p.Dst.Port(), strings.ToLower(p.Protocol.String())}})
	if err != nil {
		return err
	}
	var want []string
	masquerades := false
	for _, b := range branches {
		text := strings.ToUpper(b.Verdict.String())
		if b.Verdict == netfilter.Accept {
			if text = b.To.String(); b.To == p.Dst {
				continue
			}
			masquerades = masquerades || b.Masqueraded || b.Mark != 0
		}
		if !slices.Contains(want, text) {
			want = append(want, text)
		}
	}
	got := slices.DeleteFunc(slices.Clone(a.Outputs), func(text string) bool { return text == "ACCEPT" })
	slices.Sort(want)
	slices.Sort(got)
	got = slices.Compact(got)
	switch {
	case h.only(netfilter.Accept):
		if slices.Equal(want, got) && masquerades == a.Masquerades {
			return nil
		}
	case h.only(netfilter.Reject), h.only(netfilter.Drop):
		// It looks into further chains after a verdict.
		if slices.Contains(got, want[0]) {
			return nil
		}
	default:
		return nil // it follows one translation alone
	}
	return fmt.Errorf("upstream's tracer says %q, masquerading %t, of upstream's rules, and package netfilter says\n%s", a.Outputs, a.Masquerades, describe(branches))
}
