// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/proxier"
	ebpfdatapath "github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/packet"
)

// Verdicts of XDP programs, and of those at tc that redirect.
const (
	xdpDrop, xdpPass, xdpTx = 1, 2, 3
	tcShot, tcRedirect      = 2, 7
)

// accelerated has a path's XDP program run before its program at ingress.
type accelerated struct {
	program *ciliumebpf.Program
	context []byte // struct xdp_md
	out     []byte
	// memory is what the programs write of flows and Services; nil unless packets pass twice. before is its content before a packet, and
	// after that after XDP.
	memory, before, after [][]byte
	// taken counts what it forwarded or dropped, since the last reset and ever.
	taken, total uint64
}

// Offsets in struct xdp_md of linux/bpf.h.
const (
	sizeofXDP  = 24
	xdpDataEnd = 4
	xdpIngress = 12
)

// newAcceleratedPath is a path whose uplink has the XDP program.
func newAcceleratedPath(t testing.TB, opts Options) *path {
	t.Helper()
	opts.Acceleration = ebpfdatapath.Native
	p := newPath(t, opts)
	// The device got another MAC address.
	if err := p.tier.SetUplinks(t.Context(), uplinksOf(t, p.at)); err != nil {
		t.Fatal(err)
	}
	program, err := p.tier.devices.XDP(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range p.tier.Uplinks() {
		if u.Name == lab.Uplink && u.Accelerated != nil {
			t.Fatalf("%s: %v", u.Name, u.Accelerated)
		}
	}
	p.xdp = &accelerated{program: program, context: make([]byte, sizeofXDP), out: make([]byte, largestOut)}
	binary.NativeEndian.PutUint32(p.xdp.context[xdpIngress:], uint32(p.uplink))
	return p
}

// twice has what XDP forwards pass the program at ingress alone as well.
func (p *path) twice(t testing.TB) *path {
	t.Helper()
	view[lbmap.Flow](t, p, "tdm_flow")
	view[lbmap.FlowEntry](t, p, "tdm_flow_entry")
	view[uint64](t, p, "tdm_flow_filter")
	view[uint64](t, p, "tdm_flow_young")
	view[lbmap.FlowCounter](t, p, "tdm_flow_count")
	view[lbmap.FlowList](t, p, "tdm_flow_free")
	view[lbmap.ServiceStats](t, p, "tdm_svc_stats")
	return p
}

// view maps the memory of a map.
func view[T any](t testing.TB, p *path, name string) {
	t.Helper()
	_, b, err := lbmap.Memory[T](p.maps[name])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	x := p.xdp
	x.memory, x.before, x.after = append(x.memory, b), append(x.before, make([]byte, len(b))), append(x.after, make([]byte, len(b)))
}

func copyAll(to, from [][]byte) {
	for i := range to {
		copy(to[i], from[i])
	}
}

// moment is what the programs' state depends on besides packets.
type moment struct {
	second int64
	cpu    int
}

func thisMoment() (m moment, err error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &now); err != nil {
		return m, err
	}
	var cpu uint32
	if _, _, errno := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&cpu)), 0, 0); errno != 0 {
		return m, errno
	}
	return moment{now.Sec, int(cpu)}, nil
}

// runAccelerated runs XDP on a frame, and the program at ingress if that passes it. With twice, that program then gets what XDP forwarded
// in the state of before: alone, it has to do the same to the packet and to the state.
func (p *path) runAccelerated(frame []byte) (datapath.Result, error) {
	x := p.xdp
	copyAll(x.before, x.memory)
	began, err := thisMoment()
	if err != nil {
		return datapath.Result{}, err
	}
	r, passed, err := x.run(frame)
	if err != nil {
		return r, err
	}
	if x.memory == nil && !passed {
		return r, nil
	}
	if passed {
		// It asks in another second whether the stack had a packet for the next hop.
		now, err := thisMoment()
		if err == nil && began == now && !slices.EqualFunc(x.before, x.memory, bytes.Equal) {
			return r, disagreement{fmt.Errorf("XDP passed a packet and changed its flow: %x", frame)}
		}
		return p.runTC(in, frame)
	}
	copyAll(x.after, x.memory)
	copyAll(x.memory, x.before)
	counted, err := p.reasons()
	if err != nil {
		return r, err
	}
	alone, err := p.runTC(in, frame)
	if err != nil {
		return r, err
	}
	again, err := p.reasons()
	if err != nil {
		return r, err
	}
	for name, n := range again {
		p.counted[name] += n - counted[name]
	}
	if alone.Verdict != r.Verdict || !bytes.Equal(alone.Frame, r.Frame) {
		return r, disagreement{fmt.Errorf("XDP made of\n%x\nverdict %d\n%x\nthe program at ingress alone verdict %d\n%x", frame, r.Verdict, r.Frame, alone.Verdict, alone.Frame)}
	}
	ended, err := thisMoment()
	if err == nil && began == ended && !slices.EqualFunc(x.after, x.memory, bytes.Equal) {
		err = disagreement{fmt.Errorf("after XDP, the flow is in another state than after the program at ingress alone: %x", frame)}
	}
	return r, err
}

// run runs the program on a frame. What it passes has to be unmodified; what it forwards is as if the program at ingress had
// redirected it, but for link-layer addresses, which the kernel replaces after that one.
func (x *accelerated) run(frame []byte) (r datapath.Result, passed bool, err error) {
	binary.NativeEndian.PutUint32(x.context[xdpDataEnd:], uint32(len(frame)))
	opts := ciliumebpf.RunOptions{Data: frame, DataOut: x.out[:largestOut], Context: x.context}
	verdict, err := x.program.Run(&opts)
	if err != nil {
		return r, false, fmt.Errorf("run the XDP program on %x: %w", frame, err)
	}
	switch verdict {
	case xdpPass:
		if !bytes.Equal(opts.DataOut, frame) {
			err = disagreement{fmt.Errorf("XDP passed a modified packet:\n%x\nfor\n%x", opts.DataOut, frame)}
		}
		return r, true, err
	case xdpDrop:
		x.taken++
		x.total++
		return datapath.Result{Verdict: tcShot, Frame: frame}, false, nil
	case xdpTx:
		x.taken++
		x.total++
		copy(opts.DataOut[:12], frame)
		return datapath.Result{Verdict: tcRedirect, Frame: opts.DataOut}, false, nil
	}
	return r, false, disagreement{fmt.Errorf("XDP verdict %d for\n%x", verdict, frame)}
}

// TestPacketsAccelerated is TestPackets and TestPacketsDirect with XDP before the program at ingress: together they do the same as that
// program alone.
func TestPacketsAccelerated(t *testing.T) {
	compare := func(t *testing.T, p *path, packets int) {
		compareRandomly(t, p.twice(t), packets)
		if least := uint64(packets / 100); p.xdp.total < least {
			t.Errorf("XDP forwarded %d packets, want %d or more", p.xdp.total, least)
		}
		t.Logf("XDP forwarded %d packets", p.xdp.total)
	}
	t.Run("masqueraded", func(t *testing.T) { compare(t, newAcceleratedPath(t, Options{}), kernel.Rounds(*packetCount/2)) })
	for _, d := range datapath.Dispatches {
		t.Run(fmt.Sprint(d), func(t *testing.T) {
			compare(t, newDirectPath(t, d, Options{}, newAcceleratedPath), kernel.Rounds(*packetCount/4))
		})
	}
	t.Run("ipip from prefixes", func(t *testing.T) {
		compare(t, newDirectPath(t, datapath.IPIP{}, Options{DirectSources: directSources}, newAcceleratedPath), kernel.Rounds(*packetCount/4))
	})
}

// TestFirstPacketsAccelerated: XDP forwards the first packets of TCP connections by direct server return, and drops those that source
// ranges do not admit, as the programs of tc do, and leaves all others to them.
func TestFirstPacketsAccelerated(t *testing.T) {
	for name, dispatch := range dispatches {
		t.Run(name, func(t *testing.T) {
			opts := Options{Dispatch: dispatch}
			firstPacketsAccelerated(t, newPath(t, opts), newAcceleratedPath(t, opts))
		})
	}
}

func firstPacketsAccelerated(t *testing.T, plain, accelerated *path) {
	client := netip.MustParseAddr("198.51.100.9")
	there, here, masqueraded := netip.MustParseAddr("10.96.0.11"), netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("10.96.0.12")
	ranged, none := netip.MustParseAddr("203.0.113.13"), netip.MustParseAddr("10.96.0.14")
	remote := netip.MustParseAddr("10.244.2.7")
	for _, p := range []*path{plain, accelerated} {
		if err := p.resolve(); err != nil {
			t.Fatal(err)
		}
		policy := pathPolicy(p.at)
		policy.Forwarding = proxier.DSR
		p.UpdatePolicy(policy, func(*proxier.Facts) {})
		serve := func(name string, vip netip.Addr, node string, backend netip.Addr, mutate ...func(*v1.Service)) {
			p.OnServiceAdd(writertest.Service(name, vip.String(), mutate...))
			s := writertest.Slice(name+"-4", name)
			if node != "" {
				s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{backend.String()}, NodeName: &node})
			}
			p.OnEndpointSliceAdd(s)
		}
		serve("here", here, p.at.Name, p.pod.Addr4)
		serve("there", there, p.node2.Name, remote)
		serve("masqueraded", masqueraded, p.node2.Name, remote, func(s *v1.Service) {
			s.Annotations = map[string]string{proxier.AnnotationForwarding: "snat"}
		})
		serve("ranged", netip.MustParseAddr("10.96.0.13"), p.node2.Name, remote, func(s *v1.Service) {
			s.Spec.Type = v1.ServiceTypeLoadBalancer
			s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0/24"}
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: ranged.String()}}
		})
		serve("none", none, "", netip.Addr{})
		if err := p.sync(); err != nil {
			t.Fatal(err)
		}
		p.tier.writer.SetDirect(map[netip.Addr]struct{}{remote: {}})
		if err := p.reset(); err != nil {
			t.Fatal(err)
		}
	}
	from := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(client, port) }
	to := func(vip netip.Addr) netip.AddrPort { return netip.AddrPortFrom(vip, 80) }
	for _, c := range []struct {
		name    string
		packets []packet.Packet
		taken   int // of them
	}{
		{"a connection", []packet.Packet{tcp(from(1), to(there), packet.SYN), tcp(from(1), to(there), packet.ACK)}, 2},
		{"a connection that the ranges admit", []packet.Packet{tcp(netip.MustParseAddrPort("192.0.2.9:1"), to(ranged), packet.SYN)}, 1},
		{"one that they do not admit", []packet.Packet{tcp(from(1), to(ranged), packet.SYN)}, 1},
		{"an ACK of no connection", []packet.Packet{tcp(from(1), to(there), packet.ACK)}, 0},
		{"a SYN-ACK of no connection", []packet.Packet{tcp(from(1), to(there), packet.SYN|packet.ACK)}, 0},
		{"a reset of no connection", []packet.Packet{tcp(from(1), to(there), packet.SYN|packet.RST)}, 0},
		{"a datagram", []packet.Packet{udp(from(1), to(there))}, 0},
		{"to an endpoint on the node", []packet.Packet{tcp(from(1), to(here), packet.SYN)}, 0},
		{"to be masqueraded", []packet.Packet{tcp(from(1), to(masqueraded), packet.SYN)}, 0},
		{"to no endpoint", []packet.Packet{tcp(from(1), to(none), packet.SYN)}, 0},
		{"to no Service", []packet.Packet{tcp(from(1), to(netip.MustParseAddr("10.96.0.99")), packet.SYN)}, 0},
		{"at its last hop", []packet.Packet{withTTL(tcp(from(1), to(there), packet.SYN), 1)}, 0},
		{"from an invalid source", []packet.Packet{tcp(netip.MustParseAddrPort("127.0.0.1:1"), to(there), packet.SYN)}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			// XDP leaves a packet for each next hop to the stack once a second.
			for attempt := 1; ; attempt++ {
				var told [2][]string
				for i, p := range []*path{plain, accelerated} {
					if err := p.reset(); err != nil {
						t.Fatal(err)
					}
					for _, q := range c.packets {
						r, err := p.ask(in, q)
						if err != nil {
							t.Fatal(err)
						}
						told[i] = append(told[i], fmt.Sprintf("verdict %d: %x", r.Verdict, r.Frame))
					}
					counts, err := p.counts()
					if err != nil {
						t.Fatal(err)
					}
					told[i] = append(told[i], fmt.Sprint(counts, p.serviceStats(), p.dump()))
				}
				if !slices.Equal(told[0], told[1]) {
					t.Fatalf("tc alone:\n%s\nwith XDP:\n%s", strings.Join(told[0], "\n"), strings.Join(told[1], "\n"))
				}
				if taken := int(accelerated.xdp.taken); taken == c.taken {
					return
				} else if taken > c.taken || attempt == 10 {
					t.Fatalf("XDP took %d packets, want %d", taken, c.taken)
				}
			}
		})
	}
	if err := accelerated.reset(); err != nil {
		t.Fatal(err)
	}
	for _, to := range []netip.AddrPort{to(there), to(ranged)} {
		frame := accelerated.frame(tcp(from(2), to, packet.SYN))
		frame[5]++ // for another host
		var r datapath.Result
		var passed bool
		err := accelerated.at.Do(func() (err error) { r, passed, err = accelerated.xdp.run(frame); return err })
		if flows := accelerated.tier.flowTable.Used(); err != nil || !passed || flows != 0 {
			t.Errorf("a frame for another host, to %s: verdict %d, %d flows, error %v", to, r.Verdict, flows, err)
		}
	}
}
