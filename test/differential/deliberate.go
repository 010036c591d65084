// SPDX-License-Identifier: Apache-2.0

package differential

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/netfilter"
	"github.com/tandem-proxy/tandem/test/oracle"
)

// difference is a packet that upstream handles otherwise.
type difference struct {
	cluster      *oracle.Cluster
	flow         proxier.Flow
	packet       *netfilter.Packet
	want         *oracle.Answer
	ours, theirs handling
}

// healthDifference is a health check of a Service that upstream answers otherwise.
type healthDifference struct {
	cluster      *oracle.Cluster
	service      *v1.Service
	family       proxier.Family
	ours, theirs check
}

// temporary begins the name of a difference that is a mistake of Tandem's. It is not on the page.
const temporary = "to be mended: "

// udpDifference is a UDP entry of conntrack that only one of both deletes.
type udpDifference struct {
	cluster *oracle.Cluster
	entry   udpEntry
	gone    bool // by Tandem
}

// deliberate are the differences that are meant, with the statements of docs/semantics.md
// that they follow from. The first that fits counts.
var deliberate = []struct {
	name, statement string
	is              func(*difference) bool
}{
	{"unallocated ClusterIPs are rejected; upstream lets the packets go where routes lead", "S12", func(d *difference) bool {
		return d.want.Kind == 0 && d.want.Outcome == proxier.Rejected && d.theirs.passes(d.flow.Destination)
	}},
	{"of two claims on one address one is served, by kind, age and name; in upstream that whose rule comes first", "two-claims-on-one-address", func(d *difference) bool {
		return len(d.want.Rivals) > 0
	}},
	{"a ClusterIP that is an external or load balancer IP of the Service too is a ClusterIP; in upstream both at once", "two-claims-on-one-address", func(d *difference) bool {
		return d.want.Kind == proxier.ClusterIP && (d.externalIP() || d.ingress(d.flow.Destination.Addr()))
	}},
	{"an external or load balancer IP that is this node's precedes a NodePort of the same number; in upstream only while it has endpoints", "two-claims-on-one-address", func(d *difference) bool {
		return d.external() && d.want.Outcome != proxier.Forward && d.packet.Local(d.flow.Destination.Addr()) && d.nodePort()
	}},
	{"of copies of one endpoint the ready one counts; in upstream any of them", "S22", func(d *difference) bool {
		return d.want.Kind != 0 && undefinedCopies(d.cluster, d.want.Owner, proxier.FamilyOf(d.flow.Destination.Addr()))
	}},
	{"under `externalTrafficPolicy: Local` a pod of another node that comes by an uplink is outside; in upstream it is a pod, whose replies do not come back", "S45", func(d *difference) bool {
		return d.want.Origin == proxier.FromOutside && d.cluster.Facts.Origin(d.flow.Source.Addr(), d.flow.Device) == proxier.FromPod &&
			d.service().Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal
	}},
	{"source ranges are checked first; upstream does not check them where there is no endpoint", "S48", func(d *difference) bool {
		return d.want.Kind == proxier.LoadBalancer && d.want.Outcome == proxier.Dropped && d.noEndpoints() &&
			(d.theirs.only(netfilter.Reject) || d.fromHost() && d.theirs.passes(d.flow.Destination))
	}},
	{"`strictSourceRanges` closes a family that no range is of", "S48", func(d *difference) bool {
		return d.cluster.Policy.StrictSourceRanges && d.want.Kind == proxier.LoadBalancer && d.want.Outcome == proxier.Dropped &&
			!slices.ContainsFunc(d.service().Spec.LoadBalancerSourceRanges, func(text string) bool {
				p, err := netip.ParsePrefix(strings.TrimSpace(text))
				return err == nil && proxier.FamilyOf(p.Addr()) == proxier.FamilyOf(d.flow.Destination.Addr())
			})
	}},
	{"an address that is a load balancer IP and an external IP of a Service has source ranges; in upstream the external IP bypasses them", "S48", func(d *difference) bool {
		return d.want.Kind == proxier.LoadBalancer && d.want.Outcome == proxier.Dropped && d.externalIP()
	}},
	{"a load balancer IP is admitted as a source at that address; upstream admits it at the other load balancer IPs of the Service too", "S49", func(d *difference) bool {
		return d.want.Kind == proxier.LoadBalancer && d.want.Outcome == proxier.Dropped && d.ingress(d.flow.Source.Addr())
	}},
	{"external and load balancer IPs refuse this host too where there is no endpoint; upstream has no such rule", "S41", func(d *difference) bool {
		return d.fromHost() && d.external() && d.want.Outcome == proxier.Rejected && d.theirs.passes(d.flow.Destination)
	}},
	{"NodePorts are unknown at addresses that are not selected; upstream refuses them there where there is no endpoint", "S81", func(d *difference) bool {
		return d.want.Kind == 0 && d.want.Outcome == proxier.Pass && d.packet.Local(d.flow.Destination.Addr()) && d.nodePort() &&
			(d.theirs.only(netfilter.Reject) || d.theirs.only(netfilter.Drop))
	}},
	{"the word `primary` selects nothing in a family of which the node has no address; upstream serves all addresses then", "C42", func(d *difference) bool {
		s := &d.cluster.Policy.NodePorts
		f := proxier.FamilyOf(d.flow.Destination.Addr())
		return s.Primary && !d.cluster.Facts.NodeIPs[f].IsValid() && d.want.Outcome == proxier.Pass && d.nodePort()
	}},
	{"NodePorts are served at `::1`, though only by programs", "C43", func(d *difference) bool {
		return d.want.Kind == proxier.NodePort && d.flow.Destination.Addr() == netip.IPv6Loopback() && d.unserved()
	}},
	{"the word `localhost` of `nodePortAddresses` is enough; upstream needs `localhostNodePorts` too", "C43", func(d *difference) bool {
		return d.want.Kind == proxier.NodePort && d.flow.Destination.Addr().IsLoopback() && !d.cluster.Policy.NodePorts.Loopback && d.unserved()
	}},
	{"all selected loopback addresses are served; upstream serves those that a device has", "C43", func(d *difference) bool {
		return d.want.Kind == proxier.NodePort && d.flow.Destination.Addr().IsLoopback() &&
			d.flow.Destination.Addr() != netip.AddrFrom4([4]byte{127, 0, 0, 1}) && d.unserved()
	}},
}

var deliberateHealth = []struct {
	name, statement string
	is              func(*healthDifference) bool
}{
	{"of copies of one endpoint the ready one counts; in upstream any of them", "S22", func(d *healthDifference) bool {
		owner := proxier.ServicePortName{}
		owner.Namespace, owner.Name = d.service.Namespace, d.service.Name
		return undefinedCopies(d.cluster, owner, d.family)
	}},
}

var deliberateUDP = []struct {
	name, statement string
	is              func(*udpDifference) bool
}{
	{"entries of a deleted Service go; upstream keeps them", "S71", func(d *udpDifference) bool {
		return d.gone && !slices.ContainsFunc(d.cluster.Frontends(), d.of)
	}},
	{"entries of a NodePort without endpoints that serve go; upstream keeps them", "S72", func(d *udpDifference) bool {
		f := slices.IndexFunc(d.cluster.Frontends(), d.of)
		return d.gone && f >= 0 && d.cluster.Frontends()[f].Kind == proxier.NodePort && !d.serving(d.cluster.Frontends()[f].Owner)
	}},
	{"an entry of a frontend whose port is the NodePort of another Service stays; upstream looks at the port alone, and deletes it", "S71", func(d *udpDifference) bool {
		to, list := d.entry.destination, d.cluster.Frontends()
		return !d.gone && slices.ContainsFunc(list, func(f oracle.Frontend) bool { return f.Owner.Protocol == proxier.UDP && f.Addr == to }) &&
			slices.ContainsFunc(list, func(f oracle.Frontend) bool {
				return f.Owner.Protocol == proxier.UDP && f.Kind == proxier.NodePort && f.Addr.Port() == to.Port()
			})
	}},
	{"an endpoint that is ready keeps its flows, even with `serving: false`; upstream deletes them, and leads new ones there", "S71", func(d *udpDifference) bool {
		return !d.gone && slices.ContainsFunc(d.cluster.Slices, func(s *discoveryv1.EndpointSlice) bool {
			return slices.ContainsFunc(s.Endpoints, func(e discoveryv1.Endpoint) bool {
				return e.Addresses[0] == d.entry.replies.Addr().String() && ptr.Deref(e.Conditions.Ready, true) && !ptr.Deref(e.Conditions.Serving, true)
			})
		})
	}},
	{"entries that were not translated stay while there is no endpoint, as rules refuse their packets; upstream deletes them", "S71", func(d *udpDifference) bool {
		return !d.gone && d.entry.replies == d.entry.destination && len(d.backends()) == 0
	}},
}

// of reports whether the entry's destination is a frontend.
func (d *udpDifference) of(f oracle.Frontend) bool {
	to := d.entry.destination
	return f.Owner.Protocol == proxier.UDP && (f.Addr == to || f.Kind == proxier.NodePort && f.Addr.Port() == to.Port())
}

// backends are those that a new flow to the entry's destination gets.
func (d *udpDifference) backends() []netip.AddrPort {
	a := d.cluster.Ask(proxier.Flow{Source: d.entry.source, Destination: d.entry.destination, Protocol: proxier.UDP, Device: "eth0"})
	return a.Backends
}

// serving reports whether a service port has an endpoint that serves.
func (d *udpDifference) serving(owner proxier.ServicePortName) bool {
	for _, f := range d.cluster.Frontends() {
		if f.Owner == owner && f.Kind == proxier.ClusterIP && proxier.FamilyOf(f.Addr.Addr()) == proxier.FamilyOf(d.entry.destination.Addr()) {
			a := d.cluster.Ask(proxier.Flow{Source: d.entry.source, Destination: f.Addr, Protocol: proxier.UDP, Device: "eth0"})
			for _, e := range a.Endpoints {
				if e.Serving {
					return true
				}
			}
		}
	}
	return false
}

func (d *difference) external() bool {
	return d.want.Kind == proxier.LoadBalancer || d.want.Kind == proxier.ExternalIP
}

// unserved reports whether upstream does not translate the packet.
func (d *difference) unserved() bool {
	return d.theirs.passes(d.flow.Destination) || d.theirs.only(netfilter.Reject) || d.theirs.only(netfilter.Drop)
}

func (d *difference) fromHost() bool { return d.packet.In == "" }

// noEndpoints reports whether no endpoint is usable anywhere.
func (d *difference) noEndpoints() bool {
	for _, e := range d.want.Endpoints {
		if e.Cluster.In() {
			return false
		}
	}
	return true
}

// service returns the Service of the destination.
func (d *difference) service() *v1.Service {
	for _, s := range d.cluster.Services {
		if s.Namespace == d.want.Owner.Namespace && s.Name == d.want.Owner.Name {
			return s
		}
	}
	return &v1.Service{}
}

// externalIP reports whether the destination is an external IP of its Service.
func (d *difference) externalIP() bool {
	return slices.Contains(d.service().Spec.ExternalIPs, d.flow.Destination.Addr().String())
}

// ingress reports whether an address is a load balancer IP of the destination's Service.
func (d *difference) ingress(a netip.Addr) bool {
	return slices.ContainsFunc(d.service().Status.LoadBalancer.Ingress, func(in v1.LoadBalancerIngress) bool { return in.IP == a.String() })
}

// nodePort reports whether the destination's port is a NodePort.
func (d *difference) nodePort() bool {
	return slices.ContainsFunc(d.cluster.Frontends(), func(f oracle.Frontend) bool {
		return f.Kind == proxier.NodePort && f.Owner.Protocol == d.flow.Protocol && f.Addr.Port() == d.flow.Destination.Port() &&
			f.Addr.Addr().Is4() == d.flow.Destination.Addr().Is4()
	})
}

// undefinedCopies reports whether copies of an endpoint differ about which upstream's order of
// slices, which is random, decides: several that are not terminating, or only terminating ones.
// It looks at one port of a Service, or with an empty protocol at all.
func undefinedCopies(c *oracle.Cluster, owner proxier.ServicePortName, f proxier.Family) bool {
	type place struct {
		port     string
		protocol v1.Protocol
		number   int32
		addr     string
	}
	type copies struct{ running, terminating []discoveryv1.Endpoint }
	found := map[place]*copies{}
	for _, s := range c.Slices {
		if s.Namespace != owner.Namespace || s.Labels[discoveryv1.LabelServiceName] != owner.Name || string(s.AddressType) != string(ipFamilies[f]) {
			continue
		}
		for _, p := range s.Ports {
			if owner.Protocol != 0 && (*p.Name != owner.Port || string(*p.Protocol) != owner.Protocol.String()) {
				continue
			}
			for _, e := range s.Endpoints {
				at := place{*p.Name, *p.Protocol, *p.Port, e.Addresses[0]}
				if found[at] == nil {
					found[at] = &copies{}
				}
				if ptr.Deref(e.Conditions.Terminating, false) {
					found[at].terminating = append(found[at].terminating, e)
				} else {
					found[at].running = append(found[at].running, e)
				}
			}
		}
	}
	for _, c := range found {
		list := c.running
		if len(list) == 0 {
			list = c.terminating
		}
		for _, e := range list {
			if !reflect.DeepEqual(e, list[0]) {
				return true
			}
		}
	}
	return false
}

// sectionHead begins the section of docs/compatibility.md about these differences.
const sectionHead = "\n## With random clusters\n"

// Section is the section of docs/compatibility.md about these differences.
func Section() string {
	var b strings.Builder
	b.WriteString(sectionHead + `
Upstream's iptables proxier is compared for random dual-stack clusters and packets: its rules, the health
checks that it reports, and the UDP entries of conntrack that it deletes
([testing.md](testing.md#beside-upstreams-iptables-proxier)). Objects are valid. These are all differences
that were found:

`)
	line := func(name, statement string) {
		text := "[" + statement + "](semantics.md#" + strings.ToLower(statement) + ")"
		if strings.Contains(statement, "-") {
			text = "[" + strings.ReplaceAll(statement, "-", " ") + "](semantics.md#" + statement + ")"
		}
		fmt.Fprintf(&b, "- %s%s (%s)\n", strings.ToUpper(name[:1]), name[1:], text)
	}
	for _, l := range deliberate {
		line(l.name, l.statement)
	}
	for _, l := range deliberateHealth {
		if strings.HasPrefix(l.name, temporary) {
			continue
		}
		line("health checks: "+l.name, l.statement)
	}
	for _, l := range deliberateUDP {
		line("conntrack: "+l.name, l.statement)
	}
	return b.String()
}

// meant reports whether a difference is listed, and counts it.
func (u *Upstream) meant(d *difference) bool {
	for _, l := range deliberate {
		if l.is(d) {
			u.count(l.name)
			return true
		}
	}
	return false
}

func (u *Upstream) meantHealth(d *healthDifference) bool {
	for _, l := range deliberateHealth {
		if l.is(d) {
			u.count(l.name)
			return true
		}
	}
	return false
}

func (u *Upstream) meantUDP(d *udpDifference) bool {
	for _, l := range deliberateUDP {
		if l.is(d) {
			u.count(l.name)
			return true
		}
	}
	return false
}

func (u *Upstream) count(name string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.counts[name]++
}

// LogCounts logs how often each listed difference was found.
func (u *Upstream) LogCounts(tb testing.TB) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(u.counts)) {
		tb.Logf("%6d %s", u.counts[name], name)
	}
}
