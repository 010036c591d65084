// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"net/netip"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/packet"

	ebpfdatapath "github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
)

// loadHold loads the programs that hold packets back, for test runs.
func loadHold(t testing.TB, maps lbmap.Maps) *ciliumebpf.Collection {
	t.Helper()
	kernel.Needs(t, capabilities.NetfilterHook)
	collection, err := ebpfdatapath.LoadHold(t.Context(), maps)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(collection.Close)
	return collection
}

// TestPacketHeldBack: of the packets that no program on a device has translated, those are held back
// that would end a connection which still has a flow.
func TestPacketHeldBack(t *testing.T) {
	p := newPath(t, Options{})
	hold := loadHold(t, p.maps)
	services := []netip.Addr{netip.MustParseAddr("10.100.0.1"), netip.MustParseAddr("10.100.0.2")}
	for i, addr := range services {
		p.addBenchService(i, addr)
	}
	// The backend of a third one has its address and port, as with a pod in the host's network.
	same := writertest.Service("same", p.pod.Addr4.String())
	same.Spec.Ports[0].Port = targetPort
	p.OnServiceAdd(same)
	slice := writertest.Slice("same-4", "same")
	slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{p.pod.Addr4.String()}, NodeName: &p.at.Name})
	p.OnEndpointSliceAdd(slice)
	if err := p.sync(); err != nil {
		t.Fatal(err)
	}
	client := netip.MustParseAddrPort("198.51.100.9:1000")
	here := datapath.Tuple{Src: client, Dst: netip.AddrPortFrom(services[0], 80)}
	there := datapath.Tuple{Src: client, Dst: netip.AddrPortFrom(services[1], 80)}
	replyHere, replyThere := p.establish(t, here), p.establish(t, there)
	turned := func(d datapath.Tuple) datapath.Tuple { return datapath.Tuple{Src: d.Dst, Dst: d.Src} }
	equal := datapath.Tuple{Src: netip.MustParseAddrPort("198.51.100.9:1001"), Dst: netip.AddrPortFrom(p.pod.Addr4, targetPort)}
	if reply := p.establish(t, equal); reply != turned(equal) {
		t.Fatalf("%v is translated to %v", equal, reply)
	}
	other := datapath.Tuple{Src: client, Dst: netip.MustParseAddrPort("10.100.0.1:81")}

	const drop, accept = 0, 1
	toHost, toPod := hold.Programs["tdm_hold_in4"], hold.Programs["tdm_hold_pod4"]
	// The kernel takes a packet without Ethernet header here, as at the hook.
	expect := func(name string, program *ciliumebpf.Program, of datapath.Tuple, flags packet.Flags, want uint32) {
		t.Helper()
		got, _, err := program.Test(tcp(of.Src, of.Dst, flags).Build())
		if err != nil || got != want {
			t.Errorf("%s: verdict %d, %v, want %d", name, got, err, want)
		}
	}
	expect("a request, which the stack would reset", toHost, here, packet.ACK|packet.PSH, drop)
	expect("a request to another node", toHost, there, packet.ACK, drop)
	expect("a reply of another node", toHost, replyThere, packet.ACK, drop)
	expect("the last packet of a connection", toHost, here, packet.ACK|packet.FIN, drop)
	expect("a new connection", toHost, here, packet.SYN, accept)
	expect("the answer to a SYN", toHost, replyThere, packet.SYN|packet.ACK, drop)
	expect("a packet of no flow", toHost, other, packet.ACK, accept)
	expect("a request that is the same after translation", toHost, equal, packet.ACK, accept)
	expect("a reply of a pod, which is translated where it leaves", toHost, replyHere, packet.ACK, accept)
	expect("a reset of the client, in place of a translated one", toPod, turned(replyHere), packet.RST, drop)
	expect("such a reset to a pod in the host's network", toHost, turned(replyHere), packet.RST, drop)
	expect("a translated request", toPod, turned(replyHere), packet.ACK, accept)
	expect("a reply of a pod on its way", toPod, replyHere, packet.ACK, accept)
	expect("a reset of no flow", toPod, other, packet.RST, accept)

	// The program on the device has translated the next reset, and noted it. The pod answers one that it
	// does not accept, and the client, if it sent that, answers by another one.
	reset := tcp(here.Src, here.Dst, packet.RST)
	acked := tcp(replyHere.Src, replyHere.Dst, packet.ACK)
	acked.TCP.Ack = 1000
	p.send(t, out, acked)
	p.send(t, in, reset)
	expect("a reset that was translated, and is not accepted", toPod, turned(replyHere), packet.RST, accept)
	p.send(t, in, tcp(here.Src, here.Dst, packet.ACK))
	expect("a reset in place of a translated one, after other segments", toPod, turned(replyHere), packet.RST, drop)
	reset.TCP.Seq = 1000
	p.send(t, in, reset)
	expect("a reset that was translated", toPod, turned(replyHere), packet.RST, accept)

	// A connection of this host has the port of the reply, and its packets are translated to that.
	if err := p.at.Do(func() error {
		own := turned(replyThere)
		_, err := p.run(out, p.frame(tcp(own.Src, own.Dst, packet.SYN)))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	expect("a translated reply to this host", toHost, replyThere, packet.ACK, accept)

	udp := packet.NewUDP(here.Src, here.Dst, nil)
	if got, _, err := toHost.Test(udp.Build()); err != nil || got != accept {
		t.Errorf("a datagram: verdict %d, %v", got, err)
	}
	counts, err := p.reasons()
	if err != nil || counts["HELD_BACK"] != 8 {
		t.Errorf("counted %d, %v", counts["HELD_BACK"], err)
	}
}

// BenchmarkHold is what these programs cost the packets of this host and of its pods.
func BenchmarkHold(b *testing.B) {
	p := newPath(b, Options{Sizes: lbmap.DefaultSizes()})
	hold := loadHold(b, p.maps)
	src, dst := netip.MustParseAddrPort("198.51.100.9:1000"), netip.MustParseAddrPort("10.100.0.1:80")
	for name, c := range map[string]struct {
		program string
		packet  packet.Packet
	}{
		"to-host/tcp": {"tdm_hold_in4", tcp(src, dst, packet.ACK)},
		"to-host/udp": {"tdm_hold_in4", packet.NewUDP(src, dst, nil)},
		"to-pod/tcp":  {"tdm_hold_pod4", tcp(src, dst, packet.ACK)},
	} {
		b.Run(name, func(b *testing.B) {
			_, took, err := hold.Programs[c.program].Benchmark(c.packet.Build(), 1_000_000, b.ResetTimer)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(took.Nanoseconds()), "ns/packet")
		})
	}
}

// BenchmarkAudit is what an audit of one uplink, the cgroup and a pod's device costs.
func BenchmarkAudit(b *testing.B) {
	e := newEdge(b, Options{})
	for b.Loop() {
		if err := e.tier.audit(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
