// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/packet"
)

// BenchmarkXDP measures the time of the XDP program for a packet, as BenchmarkPacket does of those of tc: of established
// connections to other nodes, masqueraded and by direct server return, of SYNs by direct server return, and of packets of no Service.
func BenchmarkXDP(b *testing.B) {
	const frontends, flows = 10, 50000
	sizes := lbmap.DefaultSizes()
	sizes.TCPFlows = 4 * flows // half of it is for direct server return
	p := newAcceleratedPath(b, Options{Sizes: sizes})
	if err := p.resolve(); err != nil {
		b.Fatal(err)
	}
	policy := pathPolicy(p.at)
	policy.Forwarding = proxier.SNAT
	p.UpdatePolicy(policy, func(*proxier.Facts) {})
	var to [2][]netip.AddrPort // masqueraded, and direct
	ready := map[netip.Addr]struct{}{}
	for i := range 2 * frontends {
		addr := netip.AddrFrom4([4]byte{10, 100, 0, byte(i)})
		to[i%2] = append(to[i%2], netip.AddrPortFrom(addr, 80))
		service := writertest.Service(fmt.Sprintf("s%d", i), addr.String())
		if i%2 == 1 {
			service.Annotations = map[string]string{proxier.AnnotationForwarding: "dsr"}
		}
		p.OnServiceAdd(service)
		backend := netip.AddrFrom4([4]byte{10, 244, 2, byte(1 + i)})
		ready[backend] = struct{}{}
		slice := writertest.Slice(service.Name+"-4", service.Name, backend.String())
		slice.Endpoints[0].NodeName = &p.node2.Name
		p.OnEndpointSliceAdd(slice)
	}
	if err := p.sync(); err != nil {
		b.Fatal(err)
	}
	p.tier.writer.SetDirect(ready)
	client := func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{8, byte(i >> 16), byte(i >> 8), byte(i)}), 1000)
	}
	var requests [2][]datapath.Tuple
	var replies []datapath.Tuple
	for i := range flows {
		r := datapath.Tuple{Src: client(i), Dst: to[0][i%frontends]}
		requests[0], replies = append(requests[0], r), append(replies, p.establish(b, r))
		r.Dst = to[1][i%frontends]
		requests[1] = append(requests[1], r)
		for _, flags := range []packet.Flags{packet.SYN, packet.ACK} {
			if _, err := p.ask(in, tcp(r.Src, r.Dst, flags)); err != nil {
				b.Fatal(err)
			}
		}
	}
	var unserved []datapath.Tuple
	for _, r := range requests[0] {
		unserved = append(unserved, datapath.Tuple{Src: r.Dst, Dst: r.Src})
	}
	var fresh []datapath.Tuple
	for i := range 20 * flows {
		fresh = append(fresh, datapath.Tuple{Src: client(flows + i), Dst: to[1][i%frontends]})
	}
	for _, c := range []struct {
		name  string
		of    []datapath.Tuple
		flags packet.Flags
		want  uint32
	}{
		{"no-service/flows=1", unserved[:1], packet.ACK, xdpPass},
		{"no-service", unserved, packet.ACK, xdpPass},
		{"masqueraded/flows=1", requests[0][:1], packet.ACK, xdpTx},
		{"masqueraded", requests[0], packet.ACK, xdpTx},
		{"masqueraded/reply/flows=1", replies[:1], packet.ACK, xdpTx},
		{"masqueraded/reply", replies, packet.ACK, xdpTx},
		{"direct/flows=1", requests[1][:1], packet.ACK, xdpTx},
		{"direct", requests[1], packet.ACK, xdpTx},
		{"direct/new", fresh, packet.SYN, xdpTx},
	} {
		b.Run(c.name, func(b *testing.B) { p.measureXDP(b, c.of, c.flags, c.want) })
	}
}

// measureXDP runs the XDP program on segments of these flows.
func (p *path) measureXDP(b *testing.B, of []datapath.Tuple, flags packet.Flags, want uint32) {
	frame := p.frame(tcp(of[0].Src, of[0].Dst, flags))
	d := newXDPDriver(b, of, frame)
	binary.NativeEndian.PutUint32(p.xdp.context[xdpDataEnd:], uint32(len(frame)))
	run := func(program *ciliumebpf.Program, times int) (ns float64, verdict uint32) {
		err := d.next.Put(uint32(0), program)
		if err == nil {
			err = p.at.Do(func() (err error) {
				opts := ciliumebpf.RunOptions{Data: frame, DataOut: p.xdp.out[:largestOut], Context: p.xdp.context, Repeat: uint32(min(times, math.MaxInt32))}
				began := time.Now()
				verdict, err = d.program.Run(&opts)
				ns = float64(time.Since(began).Nanoseconds()) / float64(times)
				return err
			})
		}
		if err != nil {
			b.Fatal(err)
		}
		return ns, verdict
	}
	driver, _ := run(d.nothing, 1<<20)
	run(p.xdp.program, 1<<10) // of which one may be left to the stack, for the next hop
	b.ResetTimer()
	ns, verdict := run(p.xdp.program, b.N)
	if verdict != want {
		b.Fatalf("verdict %d, want %d", verdict, want)
	}
	b.ReportMetric(ns-driver, "ns/packet")
	b.ReportMetric(0, "ns/op")
}

// newXDPDriver is newDriver for XDP. It first undoes what the program did to the packet of the run before: takes a header off
// that was put before it, and restores the Ethernet header.
func newXDPDriver(b *testing.B, of []datapath.Tuple, frame []byte) *driver {
	b.Helper()
	d := &driver{}
	b.Cleanup(d.close)
	const size, ethernet = 32, 14
	var err error
	check := func() {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	d.tuples, err = ciliumebpf.NewMap(&ciliumebpf.MapSpec{Name: "bench_tuples", Type: ciliumebpf.Array, KeySize: 4, ValueSize: size, MaxEntries: uint32(len(of))})
	check()
	keys, values := make([]uint32, len(of)), make([][size]byte, len(of))
	for i, t := range of {
		keys[i] = uint32(i)
		v := append(t.Src.Addr().AsSlice(), t.Dst.Addr().AsSlice()...)
		v = binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(v, t.Src.Port()), t.Dst.Port())
		copy(values[i][:], append(append(v, 64, 0), frame[:ethernet]...))
	}
	_, err = d.tuples.BatchUpdate(keys, values, nil)
	check()
	d.next, err = ciliumebpf.NewMap(&ciliumebpf.MapSpec{Name: "bench_next", Type: ciliumebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	check()
	end := asm.Instructions{asm.Mov.Imm(asm.R0, xdpPass).WithSymbol("end"), asm.Return()}
	d.nothing = newXDP(b, "bench_nothing", end)
	store := func(at, from, length int32) asm.Instructions {
		return asm.Instructions{
			asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, at), asm.Mov.Reg(asm.R3, asm.R7), asm.Add.Imm(asm.R3, from),
			asm.Mov.Imm(asm.R4, length), asm.FnXdpStoreBytes.Call(),
		}
	}
	program := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.FnXdpGetBuffLen.Call(), asm.JLE.Imm(asm.R0, int32(len(frame)), "same"),
		asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, 20), asm.FnXdpAdjustHead.Call(),
		asm.FnGetPrandomU32.Call().WithSymbol("same"), asm.Mod.Imm32(asm.R0, int32(len(of))), asm.StoreMem(asm.RFP, -4, asm.R0, asm.Word),
		asm.LoadMapPtr(asm.R1, d.tuples.FD()), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4), asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "end"), asm.Mov.Reg(asm.R7, asm.R0),
	}
	program = append(program, store(frameAddrs, 0, 8)...)
	program = append(program, store(framePorts, 8, 4)...)
	program = append(program, store(frameTTL, 12, 1)...)
	program = append(program, store(0, 14, ethernet)...)
	program = append(program, asm.Mov.Reg(asm.R1, asm.R6), asm.LoadMapPtr(asm.R2, d.next.FD()), asm.Mov.Imm(asm.R3, 0), asm.FnTailCall.Call())
	d.program = newXDP(b, "bench_driver", append(program, end...))
	return d
}

// newXDP loads an XDP program.
func newXDP(b *testing.B, name string, instructions asm.Instructions) *ciliumebpf.Program {
	b.Helper()
	p, err := ciliumebpf.NewProgram(&ciliumebpf.ProgramSpec{Name: name, Type: ciliumebpf.XDP, AttachType: ciliumebpf.AttachXDP, Flags: unix.BPF_F_XDP_HAS_FRAGS, License: "GPL", Instructions: instructions})
	if err != nil {
		b.Fatal(err)
	}
	return p
}
