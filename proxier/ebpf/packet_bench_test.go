// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/packet"
)

// BenchmarkPacket measures what programs take for a packet on a node with 50,000
// frontends and as many established flows.
//
// A packet that a program leaves as it was is run as often as wanted by one call of
// the kernel ("repeat" in the name): all is in the cache then. Others are run once per
// call, and the kernel's clock is read before and after; what that takes is measured
// as well and subtracted ("clock-ns"). So little runs between two system calls, of
// which the processor has to be told what to forget, that these figures are those of
// cold caches, and too high rather than too low.
func BenchmarkPacket(b *testing.B) {
	const services = 50000
	p := newPath(b, Options{Sizes: DefaultSizes()})
	// Runs that are timed are on lo.
	p.use(b, "lo")
	frontends := make([]netip.AddrPort, services) // even ones lead here, odd ones elsewhere
	for i := range frontends {
		addr := netip.AddrFrom4([4]byte{10, 100 + byte(i>>16), byte(i >> 8), byte(i)})
		frontends[i] = netip.AddrPortFrom(addr, 80)
		p.addBenchService(fmt.Sprintf("s%d", i), addr, benchBackend(i))
	}
	p.addUnchanged()
	if err := p.sync(); err != nil {
		b.Fatal(err)
	}
	client := func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{8, byte(i >> 16), byte(i >> 8), byte(i)}), 1000)
	}
	here := benchBackend(0)
	// All flows are there before any is measured.
	var requests, replies [2][][]byte // by whether they lead elsewhere
	for i, to := range frontends {
		request, reply := p.establish(b, client(i), to, benchBackend(i))
		requests[i%2], replies[i%2] = append(requests[i%2], request), append(replies[i%2], reply)
	}
	unchanged, _ := p.establish(b, client(services), here, here)
	nobody := p.frame(tcp(client(0), netip.AddrPortFrom(here.Addr(), 9), packet.ACK))
	clock := p.clock(b, nobody)

	b.Run("no-service/repeat", func(b *testing.B) { p.repeat(b, in, nobody) })
	b.Run("established/one/repeat", func(b *testing.B) { p.repeat(b, in, unchanged) })
	once := func(name string, h datapath.Hook, frames func(i int) []byte) {
		b.Run(name, func(b *testing.B) { p.once(b, h, clock, frames) })
	}
	random := func(list [][]byte) func(int) []byte {
		return func(int) []byte { return list[rand.IntN(len(list))] }
	}
	once("no-service", in, func(int) []byte { return nobody })
	once("established/one", in, func(int) []byte { return requests[0][0] })
	once("established/random", in, random(requests[0]))
	once("reply/random", out, random(replies[0]))
	once("established/random/remote", in, random(requests[1]))
	once("reply/random/remote", in, random(replies[1]))
	// More than there is room for push out each other, as in a flood.
	fresh := services
	syn := func(odd int) func(int) []byte {
		return func(i int) []byte {
			fresh++
			return p.frame(tcp(client(fresh), frontends[i*2%services+odd], packet.SYN))
		}
	}
	once("new", in, syn(0))
	once("new/remote", in, syn(1))
}

// benchBackend is that of the i-th Service: one pod of this node for every other one,
// and else one of many elsewhere, so that there are source ports for all.
func benchBackend(i int) netip.AddrPort {
	if i%2 == 0 {
		return endsOf(0).here
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 2, byte(1 + i%250)}), 8080)
}

// addBenchService adds a Service with one endpoint.
func (p *path) addBenchService(name string, addr netip.Addr, backend netip.AddrPort) {
	p.OnServiceAdd(makeService(name, addr.String()))
	p.addBenchSlice(name, backend)
}

func (p *path) addBenchSlice(name string, backend netip.AddrPort) {
	node := p.node2.Name
	if backend == benchBackend(0) {
		node = p.at.Name
	}
	s := makeSlice(name+"-4", name)
	s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{backend.Addr().String()}, NodeName: &node})
	p.OnEndpointSliceAdd(s)
}

// addUnchanged adds a Service whose load balancer IP is that of its endpoint: its
// packets are translated, and are the same afterwards.
func (p *path) addUnchanged() {
	here := benchBackend(0)
	s := makeService("unchanged", "10.96.0.1", func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Spec.Ports[0].Port = int32(here.Port())
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: here.Addr().String()}}
	})
	p.OnServiceAdd(s)
	p.addBenchSlice(s.Name, here)
}

// establish has a flow established, and returns frames of both directions of it.
func (p *path) establish(b *testing.B, client, to, backend netip.AddrPort) (request, reply []byte) {
	b.Helper()
	err := p.at.Do(func() error {
		got, err := p.run(in, p.frame(tcp(client, to, packet.SYN)))
		if err != nil {
			return err
		}
		sent := packet.Parse(got.Frame)
		if sent.Destination() != backend {
			return fmt.Errorf("%s is led to %s", to, sent.Destination())
		}
		answer, hook := p.frame(tcp(backend, sent.Source(), packet.SYN|packet.ACK)), in
		if sent.Source() == client {
			hook = out
		}
		request, reply = p.frame(tcp(client, to, packet.ACK)), p.frame(tcp(backend, sent.Source(), packet.ACK))
		if _, err := p.run(hook, answer); err != nil {
			return err
		}
		_, err = p.run(in, request)
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	return request, reply
}

// repeat measures a packet that is the same afterwards.
func (p *path) repeat(b *testing.B, h datapath.Hook, frame []byte) {
	var each time.Duration
	err := p.at.Do(func() (err error) {
		_, each, err = p.programs[h].Benchmark(frame, b.N, nil)
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(each.Nanoseconds()), "ns/packet")
	b.ReportMetric(0, "ns/op")
}

// once measures packets that are run one by one.
func (p *path) once(b *testing.B, h datapath.Hook, clock float64, frame func(i int) []byte) {
	total := time.Duration(0)
	err := p.at.Do(func() error {
		for i := range b.N {
			_, took, err := p.programs[h].Benchmark(frame(i), 1, nil)
			if err != nil {
				return err
			}
			total += took
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(total.Nanoseconds())/float64(b.N)-clock, "ns/packet")
	b.ReportMetric(clock, "clock-ns")
	b.ReportMetric(0, "ns/op")
}

// clock is what a single run of next to nothing takes: to look at the time.
func (p *path) clock(b *testing.B, frame []byte) (ns float64) {
	b.Helper()
	const runs = 20000
	arp := append([]byte{}, frame...)
	arp[12], arp[13] = 8, 6
	total := time.Duration(0)
	err := p.at.Do(func() error {
		_, least, err := p.programs[in].Benchmark(arp, 1<<20, nil)
		for range runs {
			_, took, err := p.programs[in].Benchmark(arp, 1, nil)
			if err != nil {
				return err
			}
			total += took
		}
		ns = float64(total.Nanoseconds())/runs - float64(least.Nanoseconds())
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	return ns
}
