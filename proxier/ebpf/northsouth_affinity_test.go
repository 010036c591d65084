// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// TestAffinityOfManyClients: ten thousand clients stay with their backends, through any frontend,
// while other backends come and go. They are spread again when affinity is turned off.
func TestAffinityOfManyClients(t *testing.T) {
	clients := kernel.Rounds(10_000)
	sizes := lbmap.Sizes{Frontends: 64, Services: 64, Backends: 64, Slots: 64, Affinity: 1 << 16, UDPPeers: 16, OptOuts: 16,
		TCPFlows: 16, UDPFlows: 16, YoungFlows: 64} // flows are evicted soon, so that only affinity keeps backends
	e := newEdge(t, Options{Sizes: sizes})
	sticky := func(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityClientIP }
	pods := []*lab.Pod{e.here, e.there, e.at.Pod("gone"), e.two.Pod("new")}
	const gone = 2
	e.OnServiceUpdate(nil, edgeService(sticky))
	e.use(t, pods[:3]...)
	s := newAffinityClients(t, e, pods, clients)

	first := s.callAll(t, s.e.at.Addr4, s.e.at.Addr6, nodePort)
	loads := map[int]int{}
	for _, pod := range first {
		loads[pod]++
	}
	if len(loads) != 3 || loads[0] < clients/4 || loads[1] < clients/4 || loads[gone] < clients/4 {
		t.Errorf("clients per pod: %v", loads)
	}
	// moved counts clients that changed their backend although it still exists.
	moved := func(now []int) (n int) {
		for i := range first {
			if now[i] != first[i] && first[i] != gone {
				n++
			}
		}
		return n
	}
	stayed := func(when string, now []int, noLonger bool) {
		t.Helper()
		if n := moved(now); n > 0 {
			t.Errorf("%s: %d clients changed their backend", when, n)
		}
		if slices.Contains(now, gone) == noLonger {
			t.Errorf("%s: want clients at the pod that is removed: %v", when, !noLonger)
		}
	}
	stayed("by the load balancer IP", s.callAll(t, lb4, lb6, lbPort), false)
	e.use(t, pods[0], pods[1], pods[3])
	stayed("after a backend went and one came", s.callAll(t, lb4, lb6, lbPort), true)
	e.use(t, pods[:2]...)
	stayed("after that went, too", s.callAll(t, e.at.Addr4, e.at.Addr6, nodePort), true)

	e.OnServiceUpdate(nil, edgeService(nil))
	e.sync(t)
	if n := moved(s.callAll(t, lb4, lb6, lbPort)); n < clients/4 {
		t.Errorf("without affinity, only %d clients changed their backend", n)
	}
}

// TestAffinityEnds: a client whose affinity timed out may get any backend, as the next one is picked anew. With
// Maglev it gets the same one on every node, as long as the backends are the same.
func TestAffinityEnds(t *testing.T) {
	e := newEdge(t, Options{})
	port := uint16(20000) // a datagram from a port that was used before would belong to the same flow
	for _, algorithm := range []proxier.Algorithm{proxier.Random, proxier.Maglev} {
		e.OnServiceUpdate(nil, edgeService(func(s *v1.Service) {
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			s.Annotations = map[string]string{proxier.AnnotationAlgorithm: algorithm.String()}
		}))
		e.use(t, e.here, e.there)
		for _, pod := range []*lab.Pod{e.here, e.there} {
			if algorithm == proxier.Random {
				serve(t, pod)
			}
		}
		for _, n := range e.entries() {
			t.Run(algorithm.String()+" "+n.String(), func(t *testing.T) {
				servers := map[string]int{}
				const visits = 24 // all to one of two: once in 8 million
				for range visits {
					port++
					c, err := e.client.DialFrom(t.Context(), n.network, port, n.to)
					if err != nil {
						t.Fatal(err)
					}
					r, err := lab.AskConn(t.Context(), c)
					c.Close()
					if err != nil {
						t.Fatal(err)
					}
					servers[r.Server]++
					e.forgetAffinity(t)
				}
				if one := len(servers) == 1; one != (algorithm == proxier.Maglev) {
					t.Errorf("got %v", servers)
				}
			})
		}
	}
}

// forgetAffinity ends the affinity of all clients, as their timeouts do.
func (e *edge) forgetAffinity(t *testing.T) {
	t.Helper()
	m := e.tier.maps["tdm_affinity"]
	keys, err := lbmap.Keys[lbmap.AffinityKey, lbmap.Affinity](m)
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		if err := m.Delete(key); err != nil {
			t.Fatal(err)
		}
	}
}

// affinityClients are many client addresses behind one link, half of them in each family.
type affinityClients struct {
	e     *edge
	wires [proxier.Families]*wire
	// arrived captures the packets that reach each pod.
	arrived []*lab.Capture
	count   int
	port    uint16 // of the latest calls
}

func newAffinityClients(t testing.TB, e *edge, pods []*lab.Pod, count int) *affinityClients {
	t.Helper()
	s := &affinityClients{e: e, count: count, port: 1024}
	s.wires = [proxier.Families]*wire{newWire(t, e.client, e.at.Addr4), newWire(t, e.client, e.at.Addr6)}
	for _, p := range pods {
		c, err := p.Capture(lab.Uplink, func(c lab.Captured) bool { return !c.Outgoing && c.UDP != nil && len(c.Payload) == 8 })
		if err != nil {
			t.Fatal(err)
		}
		s.arrived = append(s.arrived, c)
	}
	return s
}

// addr returns the address of a client, in ranges reserved for tests.
func (s *affinityClients) addr(i int) netip.Addr {
	if i%2 == 0 {
		return netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)})
	}
	a := netip.MustParseAddr("2001:2::").As16()
	binary.BigEndian.PutUint16(a[14:], uint16(i))
	return netip.AddrFrom16(a)
}

// callAll sends a datagram from each client, all from a new port, and returns the pod that each
// one reached.
func (s *affinityClients) callAll(t testing.TB, four, six netip.Addr, port uint16) []int {
	t.Helper()
	s.port++
	before := make([]int, len(s.arrived))
	for i, c := range s.arrived {
		before[i] = len(c.Packets())
	}
	var payload [8]byte
	binary.BigEndian.PutUint16(payload[:], s.port)
	for i := range s.count {
		binary.BigEndian.PutUint32(payload[4:], uint32(i))
		to, w := four, s.wires[proxier.IPv4]
		if s.addr(i).Is6() {
			to, w = six, s.wires[proxier.IPv6]
		}
		p := packet.NewUDP(netip.AddrPortFrom(s.addr(i), s.port), netip.AddrPortFrom(to, port), payload[:])
		if err := w.send(w.frame(p)); err != nil {
			t.Fatal(err)
		}
	}
	came := make([]int, s.count)
	deadline := time.Now().Add(10 * time.Second)
	for arrived := 0; arrived < s.count; {
		for pod, c := range s.arrived {
			list := c.Packets()[before[pod]:]
			before[pod] += len(list)
			arrived += len(list)
			for _, p := range list {
				came[binary.BigEndian.Uint32(p.Payload[4:])] = pod
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d calls arrived", arrived, s.count)
		}
	}
	return came
}
