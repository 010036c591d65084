// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// BenchmarkXDPVeth measures how many packets a second pass a node's uplink, a veth, and come back: by a program that only reflects
// them, by direct server return and masqueraded in XDP, and masqueraded by the program at tc; and how many SYNs either of them drops,
// as source ranges ask, and a program that drops all packets. They take turns. Sender, node and receiver share a CPU, so what is measured is the whole way of a packet.
func BenchmarkXDPVeth(b *testing.B) {
	const flows = 1000
	sizes := lbmap.DefaultSizes()
	fast, slow, plain := newAcceleratedPath(b, Options{Sizes: sizes}), newPath(b, Options{Sizes: sizes}), newPath(b, Options{Sizes: sizes})
	accelerated, traditional, reflected := fast.wireFlows(b, flows), slow.wireFlows(b, flows), plain.wireFlows(b, flows)
	plain.attachXDP(b, plain.at.Sandbox, lab.Uplink, newXDP(b, "bench_reflect", reflection()))
	deaf := newPath(b, Options{Sizes: sizes})
	none := deaf.wireFlows(b, flows)
	deaf.attachXDP(b, deaf.at.Sandbox, lab.Uplink, newXDP(b, "bench_drop", asm.Instructions{asm.Mov.Imm(asm.R0, xdpDrop), asm.Return()}))
	if err := slow.at.WithGRO(lab.Uplink); err != nil {
		b.Fatal(err)
	}
	for _, n := range []int{1, flows} {
		b.Run(fmt.Sprintf("flows=%d", n), func(b *testing.B) {
			takeTurns(b, []wireWay{
				{name: "reflection", wireBench: newWireBench(b, plain, reflected.snat[:n], packet.ACK)},
				{name: "dsr-xdp", reasons: []string{"ACCELERATED", "FORWARD_DIRECT"}, wireBench: newWireBench(b, fast, accelerated.dsr[:n], packet.ACK)},
				{name: "snat-xdp", reasons: []string{"ACCELERATED", "FORWARD_REMOTE"}, wireBench: newWireBench(b, fast, accelerated.snat[:n], packet.ACK)},
				{name: "snat-tc", reasons: []string{"FORWARD_REMOTE"}, wireBench: newWireBench(b, slow, traditional.snat[:n], packet.ACK)},
				{name: "drop-xdp", reasons: []string{"ACCELERATED", "DROP_SOURCE_RANGE"}, drops: true, wireBench: newWireBench(b, fast, accelerated.denied[:n], packet.SYN)},
				{name: "drop-all", drops: true, wireBench: newWireBench(b, deaf, none.denied[:n], packet.SYN)},
				{name: "drop-tc", reasons: []string{"DROP_SOURCE_RANGE"}, drops: true, wireBench: newWireBench(b, slow, traditional.denied[:n], packet.SYN)},
			})
		})
	}
}

// wireWay is a way of packets, how the programs count those, and how many pass it in its fastest turn, or end there: other work on the
// machine slows down others.
type wireWay struct {
	name    string
	reasons []string
	drops   bool
	*wireBench
	rate float64 // packets a second
}

func takeTurns(b *testing.B, ways []wireWay) {
	const count = 1 << 17
	for b.Loop() {
		for i := range ways {
			w := &ways[i]
			before, err := w.path.reasons()
			packets, took := w.send(b, count)
			after, failed := w.path.reasons()
			if w.drops {
				packets = count - packets
			}
			if err := errors.Join(err, failed); err != nil || packets < count*9/10 {
				b.Fatalf("%s: %d of %d packets came back, or were dropped; error %v", w.name, packets, count, err)
			}
			for _, reason := range w.reasons {
				if n := after[reason] - before[reason]; n < count*9/10 {
					b.Fatalf("%s: %d of %d packets counted as %s", w.name, n, count, reason)
				}
			}
			w.rate = max(w.rate, float64(packets)/took.Seconds())
		}
	}
	rate := map[string]float64{}
	for _, w := range ways {
		rate[w.name] = w.rate
		b.ReportMetric(rate[w.name]/1e6, w.name+"-Mpps")
	}
	b.ReportMetric(rate["dsr-xdp"]/rate["reflection"], "dsr/reflection")
	b.ReportMetric(rate["snat-xdp"]/rate["snat-tc"], "xdp/tc")
	b.ReportMetric(rate["drop-xdp"]/rate["drop-tc"], "drop-xdp/tc")
	b.ReportMetric(rate["drop-all"]/rate["drop-tc"], "drop-all/tc")
	b.ReportMetric(0, "ns/op")
}

// wireFlows are connections to a backend on another node: masqueraded ones and, with XDP, others by direct server return; and some that
// source ranges do not admit.
type wireFlows struct{ snat, dsr, denied []datapath.Tuple }

// wireFlows establishes those connections that can be.
func (p *path) wireFlows(b *testing.B, flows int) (list wireFlows) {
	b.Helper()
	if err := p.resolve(); err != nil {
		b.Fatal(err)
	}
	policy := pathPolicy(p.at)
	policy.Forwarding = proxier.SNAT
	p.UpdatePolicy(policy, func(*proxier.Facts) {})
	backend := netip.MustParseAddr("10.244.2.1")
	serve := func(name, addr string, mutate ...func(*v1.Service)) {
		p.OnServiceAdd(writertest.Service(name, addr, mutate...))
		slice := writertest.Slice(name+"-4", name, backend.String())
		slice.Endpoints[0].NodeName = &p.node2.Name
		p.OnEndpointSliceAdd(slice)
	}
	forwarding := func(mode string) func(*v1.Service) {
		return func(s *v1.Service) { s.Annotations = map[string]string{proxier.AnnotationForwarding: mode} }
	}
	const ranged = "203.0.113.13"
	serve("snat", "10.96.0.1", forwarding("snat"))
	serve("dsr", "10.96.0.2", forwarding("dsr"))
	serve("ranged", "10.96.0.3", func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0/24"}
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: ranged}}
	})
	if err := p.sync(); err != nil {
		b.Fatal(err)
	}
	p.tier.writer.SetDirect(map[netip.Addr]struct{}{backend: {}})
	for i := range flows {
		client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{8, 0, byte(i >> 8), byte(i)}), 1000)
		r := datapath.Tuple{Src: client, Dst: netip.MustParseAddrPort("10.96.0.1:80")}
		p.establish(b, r)
		list.snat = append(list.snat, r)
		r.Dst = netip.MustParseAddrPort("10.96.0.2:80")
		for _, flags := range []packet.Flags{packet.SYN, packet.ACK} {
			if _, err := p.ask(in, tcp(r.Src, r.Dst, flags)); err != nil {
				b.Fatal(err)
			}
		}
		list.dsr = append(list.dsr, r)
		r.Dst = netip.MustParseAddrPort(ranged + ":80")
		list.denied = append(list.denied, r)
	}
	return list
}

// wireBench sends frames from the other end of a node's uplink, and counts those that come back to it.
type wireBench struct {
	*path
	driver  *driver
	context []byte
	frame   []byte
	counter *ciliumebpf.Map
}

func newWireBench(b *testing.B, p *path, of []datapath.Tuple, flags packet.Flags) *wireBench {
	b.Helper()
	w := &wireBench{path: p, context: make([]byte, sizeofXDP), frame: p.frame(tcp(of[0].Src, of[0].Dst, flags))}
	w.driver = newXDPDriver(b, of, w.frame)
	tx := newXDP(b, "bench_tx", asm.Instructions{asm.Mov.Imm(asm.R0, xdpTx), asm.Return()})
	if err := w.driver.next.Put(uint32(0), tx); err != nil {
		b.Fatal(err)
	}
	peer, err := p.lab.Fabric().Netlink().LinkByName(p.at.FabricLink)
	if err != nil {
		b.Fatal(err)
	}
	binary.NativeEndian.PutUint32(w.context[xdpDataEnd:], uint32(len(w.frame)))
	binary.NativeEndian.PutUint32(w.context[xdpIngress:], uint32(peer.Attrs().Index))
	if w.counter, err = ciliumebpf.NewMap(&ciliumebpf.MapSpec{Name: "bench_count", Type: ciliumebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1}); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = w.counter.Close() })
	return w
}

// send returns how many of the packets came back, and how long that took.
func (w *wireBench) send(b *testing.B, count uint64) (packets uint64, took time.Duration) {
	b.Helper()
	detach := w.attachXDP(b, w.lab.Fabric(), w.at.FabricLink, newXDP(b, "bench_count", counting(w.counter)))
	defer detach()
	if err := w.counter.Put(uint32(0), uint64(0)); err != nil {
		b.Fatal(err)
	}
	err := w.lab.Fabric().Do(func() error {
		began := time.Now()
		_, err := w.driver.program.Run(&ciliumebpf.RunOptions{Data: w.frame, Context: w.context, Repeat: uint32(count), Flags: unix.BPF_F_TEST_XDP_LIVE_FRAMES})
		took = time.Since(began)
		return err
	})
	if err == nil {
		err = w.counter.Lookup(uint32(0), &packets)
	}
	if err != nil {
		b.Fatal(err)
	}
	return packets, took
}

// attachXDP attaches a program to a device until the returned function is called, or the benchmark ends.
func (p *path) attachXDP(b *testing.B, at *lab.Sandbox, device string, program *ciliumebpf.Program) func() {
	b.Helper()
	l, err := at.Netlink().LinkByName(device)
	if err != nil {
		b.Fatal(err)
	}
	var attached link.Link
	err = at.Do(func() (err error) {
		attached, err = link.AttachXDP(link.XDPOptions{Program: program, Interface: l.Attrs().Index, Flags: link.XDPDriverMode})
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	detach := func() { _ = attached.Close() }
	b.Cleanup(detach)
	return detach
}

// reflection sends frames back, with their link-layer addresses swapped.
func reflection() asm.Instructions {
	swap := asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), asm.LoadMem(asm.R3, asm.R1, 4, asm.Word),
		asm.Mov.Reg(asm.R4, asm.R2), asm.Add.Imm(asm.R4, 14), asm.JGT.Reg(asm.R4, asm.R3, "end"),
	}
	for at := int16(0); at < 6; at += 2 {
		swap = append(swap,
			asm.LoadMem(asm.R4, asm.R2, at, asm.Half), asm.LoadMem(asm.R5, asm.R2, at+6, asm.Half),
			asm.StoreMem(asm.R2, at, asm.R5, asm.Half), asm.StoreMem(asm.R2, at+6, asm.R4, asm.Half))
	}
	return append(swap, asm.Mov.Imm(asm.R0, xdpTx).WithSymbol("end"), asm.Return())
}

// counting drops frames, and counts them.
func counting(counter *ciliumebpf.Map) asm.Instructions {
	const drop = 1
	return asm.Instructions{
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, counter.FD()), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4), asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "end"), asm.Mov.Imm(asm.R1, 1), asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, drop).WithSymbol("end"), asm.Return(),
	}
}
