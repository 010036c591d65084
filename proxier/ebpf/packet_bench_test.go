// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/successor"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/packet"
)

// BenchmarkPacket measures the time of a program for one packet, on a node with 50,000 frontends
// and as many established flows, half of them to other nodes; in the end also where these leave new
// connections to another kube-proxy.
//
// The kernel's test run repeats a program with the same packet. So a small program runs first: it
// rewrites the packet to that of a random flow, and tail-calls the measured program. The time of
// the small program alone is subtracted.
func BenchmarkPacket(b *testing.B) {
	const services, clients = 50000, 1 << 20
	p := newPath(b, Options{Sizes: lbmap.DefaultSizes()})
	p.use(b, "lo") // the device of test runs that name none
	if err := p.resolve(); err != nil {
		b.Fatal(err)
	}
	var frontends [2][]netip.AddrPort
	for i := range services {
		addr := netip.AddrFrom4([4]byte{10, 100, byte(i >> 8), byte(i)})
		frontends[i%2] = append(frontends[i%2], netip.AddrPortFrom(addr, 80))
		p.addBenchService(i, addr)
	}
	if err := p.sync(); err != nil {
		b.Fatal(err)
	}
	client := func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{8, byte(i >> 16), byte(i >> 8), byte(i)}), 1000)
	}
	// All flows are created before the measurements.
	var requests, replies [2][]datapath.Tuple // index 1: backends on other nodes
	for i := range services {
		request := datapath.Tuple{Src: client(i), Dst: frontends[i%2][i/2]}
		requests[i%2], replies[i%2] = append(requests[i%2], request), append(replies[i%2], p.establish(b, request))
	}
	fresh := func(to []netip.AddrPort) (list []datapath.Tuple) {
		for i := range clients {
			list = append(list, datapath.Tuple{Src: client(services + i), Dst: to[i%len(to)]})
		}
		return list
	}
	var unserved []datapath.Tuple
	for _, r := range requests[0] {
		unserved = append(unserved, datapath.Tuple{Src: r.Dst, Dst: r.Src})
	}
	type packets struct {
		name  string
		Hook  datapath.Hook
		flags packet.Flags
		of    []datapath.Tuple
	}
	for _, c := range []packets{
		{"no-service/flows=1", in, packet.ACK, unserved[:1]},
		{"no-service", in, packet.ACK, unserved},
		{"established/flows=1", in, packet.ACK, requests[0][:1]},
		{"established/flows=1000", in, packet.ACK, requests[0][:1000]},
		{"established", in, packet.ACK, requests[0]},
		{"established/reply", out, packet.ACK, replies[0]},
		{"established/remote/flows=1", in, packet.ACK, requests[1][:1]},
		{"established/remote/flows=100", in, packet.ACK, requests[1][:100]},
		{"established/remote", in, packet.ACK, requests[1]},
		{"established/remote/reply", in, packet.ACK, replies[1]},
		// More flows than the ring has slots evict each other, as in a flood.
		{"new", in, packet.SYN, fresh(frontends[0])},
		{"new/remote", in, packet.SYN, fresh(frontends[1])},
	} {
		b.Run(c.name, func(b *testing.B) { p.measure(b, p.programs[c.Hook], c.flags, c.of) })
	}
	if err := p.maps[successor.MapName].Put(uint32(0), lbmap.Successor{YieldedNs: 1}); err != nil {
		b.Fatal(err)
	}
	for _, c := range []packets{
		{"yielded/no-service", in, packet.ACK, unserved},
		{"yielded/new", in, packet.SYN, fresh(frontends[0])},
	} {
		b.Run(c.name, func(b *testing.B) { p.measure(b, p.programs[c.Hook], c.flags, c.of) })
	}
}

// BenchmarkPacketThreads is the throughput of all CPUs together, where as many threads run a program: on established flows, all of which
// any thread may get, and on packets of new ones.
func BenchmarkPacketThreads(b *testing.B) {
	const flows, clients = 25_000, 1 << 20
	p := newPath(b, Options{Sizes: lbmap.DefaultSizes()})
	p.use(b, "lo")
	to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 100, 0, 0}), 80)
	p.addBenchService(0, to.Addr())
	if err := p.sync(); err != nil {
		b.Fatal(err)
	}
	var established, fresh []datapath.Tuple
	for i := range clients {
		request := datapath.Tuple{Src: netip.AddrPortFrom(netip.AddrFrom4([4]byte{8, byte(i >> 16), byte(i >> 8), byte(i)}), 1000), Dst: to}
		if i < flows {
			established = append(established, request)
			p.establish(b, request)
		} else {
			fresh = append(fresh, request)
		}
	}
	for _, c := range []struct {
		name  string
		flags packet.Flags
		of    []datapath.Tuple
	}{{"established", packet.ACK, established}, {"new", packet.SYN, fresh}} {
		for _, threads := range []int{1, 2, 4, 8, 16} {
			b.Run(fmt.Sprintf("%s/threads=%d", c.name, threads), func(b *testing.B) {
				drivers := make([]*driver, threads)
				for i := range drivers {
					var err error
					if drivers[i], err = newDriver(c.of); err != nil {
						b.Fatal(err)
					}
					defer drivers[i].close()
					if err := drivers[i].next.Put(uint32(0), p.programs[in]); err != nil {
						b.Fatal(err)
					}
				}
				b.ResetTimer()
				p.together(b, drivers, p.frame(tcp(c.of[0].Src, to, c.flags)))
				b.ReportMetric(float64(b.N*threads)/b.Elapsed().Seconds()/1e6, "Mpackets/s")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// together runs each driver b.N times, at the same time.
func (p *path) together(b *testing.B, drivers []*driver, frame []byte) {
	var running sync.WaitGroup
	for _, d := range drivers {
		running.Go(func() {
			if err := p.at.Do(func() error { _, _, err := d.program.Benchmark(frame, b.N, nil); return err }); err != nil {
				b.Error(err)
			}
		})
	}
	running.Wait()
}

// BenchmarkPacketFlood creates flows as fast as all CPUs can. Most of 65,536 records are in use by
// established flows, and none of those may be lost.
func BenchmarkPacketFlood(b *testing.B) {
	const established, clients = 60_000, 1 << 20
	sizes := lbmap.DefaultSizes()
	sizes.TCPFlows, sizes.YoungFlows = 1<<16, 1<<16
	p := newPath(b, Options{Sizes: sizes})
	p.use(b, "lo")
	to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 100, 0, 0}), 80)
	p.addBenchService(0, to.Addr())
	if err := p.sync(); err != nil {
		b.Fatal(err)
	}
	client := func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{8, byte(i >> 16), byte(i >> 8), byte(i)}), 1000)
	}
	var open []datapath.Tuple
	for i := range established {
		open = append(open, datapath.Tuple{Src: client(i), Dst: to})
		p.establish(b, open[i])
	}
	table := p.tier.flowTable
	born := table.Count(lbmap.FlowBorn)
	drivers := make([]*driver, runtime.NumCPU())
	for cpu := range drivers {
		var fresh []datapath.Tuple
		for i := range clients {
			fresh = append(fresh, datapath.Tuple{Src: client(established + cpu*clients + i), Dst: to})
		}
		d, err := newDriver(fresh)
		if err != nil {
			b.Fatal(err)
		}
		defer d.close()
		if err := d.next.Put(uint32(0), p.programs[in]); err != nil {
			b.Fatal(err)
		}
		drivers[cpu] = d
	}
	frame := p.frame(tcp(client(established), to, packet.SYN))
	b.ResetTimer()
	p.together(b, drivers, frame)
	b.StopTimer()
	if kept := table.Count(lbmap.FlowKeptTCP); kept != established {
		b.Errorf("%d of %d established flows remain", kept, established)
	}
	lost := 0
	for _, o := range open {
		got, err := p.ask(in, tcp(o.Src, o.Dst, packet.ACK))
		if err != nil {
			b.Fatal(err)
		}
		if packet.Parse(got.Frame).Destination().Addr() != p.pod.Addr4 {
			lost++
		}
	}
	b.ReportMetric(float64(lost), "lost")
	b.ReportMetric(float64(table.Count(lbmap.FlowBorn)-born)/b.Elapsed().Seconds(), "flows/s")
	b.ReportMetric(0, "ns/op")
}

// addBenchService adds the i-th Service. Those with even numbers have a local endpoint. The others
// have one of many remote endpoints, so that there are enough source ports.
func (p *path) addBenchService(i int, addr netip.Addr) {
	name := fmt.Sprintf("s%d", i)
	backend, node := p.pod.Addr4, p.at.Name
	if i%2 == 1 {
		backend, node = netip.AddrFrom4([4]byte{10, 244, 2, byte(1 + i%250)}), p.node2.Name
	}
	p.OnServiceAdd(writertest.Service(name, addr.String()))
	s := writertest.Slice(name+"-4", name)
	s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{backend.String()}, NodeName: &node})
	p.OnEndpointSliceAdd(s)
}

// establish establishes a flow, and returns the tuple of the backend's packets.
func (p *path) establish(b testing.TB, request datapath.Tuple) (reply datapath.Tuple) {
	b.Helper()
	err := p.at.Do(func() error {
		got, err := p.run(in, p.frame(tcp(request.Src, request.Dst, packet.SYN)))
		if err != nil {
			return err
		}
		sent := packet.Parse(got.Frame)
		reply = datapath.Tuple{Src: sent.Destination(), Dst: sent.Source()}
		hook := in
		if reply.Dst == request.Src {
			hook = out
		}
		if _, err := p.run(hook, p.frame(tcp(reply.Src, reply.Dst, packet.SYN|packet.ACK))); err != nil {
			return err
		}
		_, err = p.run(in, p.frame(tcp(request.Src, request.Dst, packet.ACK)))
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	return reply
}

// measure runs a program on segments of these flows.
func (p *path) measure(b *testing.B, program *ciliumebpf.Program, flags packet.Flags, of []datapath.Tuple) {
	frame := p.frame(tcp(of[0].Src, of[0].Dst, flags))
	d, err := newDriver(of)
	if err != nil {
		b.Fatal(err)
	}
	defer d.close()
	run := func(program *ciliumebpf.Program, times int) (ns float64) {
		err := d.next.Put(uint32(0), program)
		if err == nil {
			err = p.at.Do(func() error {
				_, each, err := d.program.Benchmark(frame, times, nil)
				ns = float64(each.Nanoseconds())
				return err
			})
		}
		if err != nil {
			b.Fatal(err)
		}
		return ns
	}
	driver := run(d.nothing, 1<<20)
	b.ResetTimer()
	b.ReportMetric(run(program, b.N)-driver, "ns/packet")
	b.ReportMetric(0, "ns/op")
}

// driver rewrites a packet to that of a random flow, and calls another program.
type driver struct {
	program, nothing *ciliumebpf.Program
	tuples, next     *ciliumebpf.Map
}

// Offsets in a frame with an IPv4 header without options.
const (
	frameTTL   = 14 + 8
	frameAddrs = 14 + 12
	framePorts = 14 + 20
)

func newDriver(of []datapath.Tuple) (d *driver, err error) {
	d = &driver{}
	defer func() {
		if err != nil {
			d.close()
		}
	}()
	const size = 16 // addresses, ports and a hop limit
	if d.tuples, err = ciliumebpf.NewMap(&ciliumebpf.MapSpec{Name: "bench_tuples", Type: ciliumebpf.Array, KeySize: 4, ValueSize: size, MaxEntries: uint32(len(of))}); err != nil {
		return d, err
	}
	keys, values := make([]uint32, len(of)), make([][size]byte, len(of))
	for i, t := range of {
		keys[i] = uint32(i)
		b := append(t.Src.Addr().AsSlice(), t.Dst.Addr().AsSlice()...)
		b = binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(b, t.Src.Port()), t.Dst.Port())
		copy(values[i][:], append(b, 64))
	}
	if _, err := d.tuples.BatchUpdate(keys, values, nil); err != nil {
		return d, err
	}
	if d.next, err = ciliumebpf.NewMap(&ciliumebpf.MapSpec{Name: "bench_next", Type: ciliumebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1}); err != nil {
		return d, err
	}
	load := func(name string, instructions asm.Instructions) (*ciliumebpf.Program, error) {
		return ciliumebpf.NewProgram(&ciliumebpf.ProgramSpec{Name: name, Type: ciliumebpf.SchedCLS, License: "GPL", Instructions: instructions})
	}
	end := asm.Instructions{asm.Mov.Imm(asm.R0, 0).WithSymbol("end"), asm.Return()}
	d.nothing, err = load("bench_nothing", end)
	if err != nil {
		return d, err
	}
	store := func(at, from, length int32) asm.Instructions {
		return asm.Instructions{
			asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, at), asm.Mov.Reg(asm.R3, asm.R7), asm.Add.Imm(asm.R3, from),
			asm.Mov.Imm(asm.R4, length), asm.Mov.Imm(asm.R5, 0), asm.FnSkbStoreBytes.Call(),
		}
	}
	program := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.FnGetPrandomU32.Call(), asm.Mod.Imm32(asm.R0, int32(len(of))), asm.StoreMem(asm.RFP, -4, asm.R0, asm.Word),
		asm.LoadMapPtr(asm.R1, d.tuples.FD()), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4), asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "end"), asm.Mov.Reg(asm.R7, asm.R0),
	}
	program = append(program, store(frameAddrs, 0, 8)...)
	program = append(program, store(framePorts, 8, 4)...)
	program = append(program, store(frameTTL, 12, 1)...)
	program = append(program, asm.Mov.Reg(asm.R1, asm.R6), asm.LoadMapPtr(asm.R2, d.next.FD()), asm.Mov.Imm(asm.R3, 0), asm.FnTailCall.Call())
	d.program, err = load("bench_driver", append(program, end...))
	return d, err
}

func (d *driver) close() {
	_ = errors.Join(d.program.Close(), d.nothing.Close(), d.tuples.Close(), d.next.Close()) // Close accepts nil
}
