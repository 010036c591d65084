// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/kernel/xdp"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// accelerated are the flags for each form of packets that XDP forwards.
var accelerated = map[string][]string{"snat": nil, "ipip": ipip, "geneve": geneve, "opt": opt}

// TestAcceleration: XDP forwards packets of established connections both ways, and by direct server return those that open connections too.
func TestAcceleration(t *testing.T) {
	for mode, flags := range accelerated {
		t.Run(mode, func(t *testing.T) {
			s := newDirectStage(t, serve, lab.Options{NoOffload: true, XDP: true, PortsInTurn: mode == "opt"}) // see TestDirectOnePort
			defer s.end(t)
			s.startAll(t, append(slices.Clone(flags), "--ebpf-acceleration=native", "--ebpf-max-tcp-flows=4096")...)
			if mode != "snat" {
				s.ready(t, 0, 4)
			}
			for _, p := range s.processes {
				p.await(t, "acceleration", p.Says(`"XDP forwards packets"`))
			}
			ways := outside(s.nodes[0])
			flows := openFlows(t, s.far.Sandbox, ways, s.pods...)
			check := func(when string) {
				t.Helper()
				before := counted(t, s.nodes[0], "accelerated")
				for range 10 {
					checkAll(t, flows)
				}
				n := counted(t, s.nodes[0], "accelerated") - before
				// A request at least, and of masqueraded connections a reply.
				if least := float64(10 * len(flows) * map[bool]int{true: 2, false: 1}[mode == "snat"]); n < least*0.9 {
					t.Errorf("%s: XDP forwarded %v packets, want %v or more", when, n, least)
				}
			}
			check("at the start")
			// With more connections, the maps of flows grow, and the XDP program is replaced.
			first, _ := onUplink(t, s.nodes[0])
			grown := s.processes[0].Says("Replaced eBPF maps by larger ones")
			for opened := 0; grown() != nil; opened++ {
				if opened == 100 {
					t.Fatal("the maps did not grow")
				}
				openFlows(t, s.far.Sandbox, ways, s.pods...)
			}
			if now, name := onUplink(t, s.nodes[0]); name != "tdm_xdp" || now.Program == first.Program {
				t.Errorf("on the uplink is %q, %+v; it was %+v", name, now, first)
			}
			check("with larger maps")
		})
	}
}

// onUplink is the XDP program on the uplink of a node, with its name; 0 and empty for none.
func onUplink(t testing.TB, n *lab.Node) (state xdp.State, name string) {
	t.Helper()
	err := n.Do(func() error {
		link, err := netlink.LinkByName(lab.Uplink)
		if err != nil {
			return err
		}
		state, err = xdp.Look(link.Attrs().Index)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if state.Program == 0 {
		return state, ""
	}
	p, err := ciliumebpf.NewProgramFromID(state.Program)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		t.Fatal(err)
	}
	return state, info.Name
}

// TestAccelerationUnderLoad: XDP goes on while no process runs, and no connection fails while processes are killed and replaced, and
// acceleration and direct server return come and go.
func TestAccelerationUnderLoad(t *testing.T) {
	s := newDirectStage(t, serve, lab.Options{NoOffload: true, XDP: true, PortsInTurn: true}) // see TestDirectOnePort
	defer s.end(t)
	const native = "--ebpf-acceleration=native"
	s.startAll(t, native)
	ways := outside(s.nodes[0])
	flows := openFlows(t, s.far.Sandbox, ways, s.pods...)
	w := lab.NewLoad(t)
	defer w.End()
	w.Use(s.far.Sandbox, ways, gently)
	step := func(what string) { t.Helper(); s.step(t, w, flows, what) }
	step("accelerated")
	first, name := onUplink(t, s.nodes[0])
	if name != "tdm_xdp" || !first.Native {
		t.Fatalf("on the uplink is %q, %+v", name, first)
	}
	_ = s.processes[0].Close()
	s.processes[0] = nil
	step("killed")
	for _, flags := range [][]string{{native}, {native, "--lb-mode=dsr"}, {native, "--lb-mode=dsr", "--dsr-dispatch=geneve"}, {native, "--lb-mode=dsr", "--dsr-dispatch=opt"}, {}, {"--lb-mode=dsr"}, {"--ebpf-acceleration=best-effort"}, {native}} {
		s.start(t, 0, flags...)
		step(fmt.Sprint(flags))
		want := map[bool]string{true: "tdm_xdp"}[slices.Contains(flags, native)] // best-effort leaves veths alone
		await(t, fmt.Sprintf("XDP program %q with %v", want, flags), func() error {
			if _, name := onUplink(t, s.nodes[0]); name != want {
				return fmt.Errorf("on the uplink is %q", name)
			}
			return nil
		})
	}
	w.End()
	few(t, w)
	for i := range s.nodes {
		_ = s.processes[i].Close()
		s.processes[i] = nil
		cleanup(t, s.nodes[i])
		if state, name := onUplink(t, s.nodes[i]); state.Program != 0 {
			t.Errorf("after --cleanup, %s has %s", s.nodes[i].Name, name)
		}
	}
}

// TestAccelerationAcrossUplinks: XDP forwards between clients behind one uplink and endpoints behind another one.
func TestAccelerationAcrossUplinks(t *testing.T) {
	const second, perFlow = "eth1", 10
	s := newStage(t, lab.Options{NoOffload: true, XDP: true})
	defer s.end()
	if err := lab.Connect(s.node.Sandbox, second, s.far.Sandbox, second, 1500); err != nil {
		t.Fatal(err)
	}
	if err := s.far.ReceivesXDP(second); err != nil {
		t.Fatal(err)
	}
	for host, m := range map[string]*lab.Sandbox{"1": s.node.Sandbox, "2": s.far.Sandbox} {
		if err := m.WithoutOffload(second); err != nil {
			t.Fatal(err)
		}
		for _, args := range []string{"address add 192.168.77." + host + "/24 dev eth1", "address add fd00:77::" + host + "/64 dev eth1 nodad", "link set eth1 up"} {
			if out, err := m.Command(t.Context(), "ip", strings.Fields(args)...).CombinedOutput(); err != nil {
				t.Fatalf("ip %s: %v: %s", args, err, out)
			}
		}
	}
	needsXDPTarget(t, s.node, second)
	s.start("--ebpf-acceleration=native", "--ebpf-devices=eth0,eth1")
	s.process.serves(t)
	v4, v6 := netip.MustParseAddrPort("192.168.77.1:30080"), netip.MustParseAddrPort("[fd00:77::1]:30080")
	flows := openFlows(t, s.far.Sandbox, map[string]netip.AddrPort{"tcp4": v4, "udp4": v4, "tcp6": v6, "udp6": v6}, s.here, s.there)
	elsewhere := countTo(flows, s.there)
	before := counted(t, s.node, "accelerated")
	for range perFlow {
		checkAll(t, flows)
	}
	// A request and a reply each; a packet for each next hop is left to the stack once a second.
	if n, least := counted(t, s.node, "accelerated")-before, float64(2*perFlow*elsewhere); n < least*0.9 {
		t.Errorf("XDP forwarded %v packets, want %v or more", n, least)
	}
	// A driver that does not send them any more would lose them.
	if err := s.far.LosesXDP(second); err != nil {
		t.Fatal(err)
	}
	const enough, limit = 20, 5 * time.Second
	began := time.Now()
	for answers := 0; answers < enough; answers++ {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second/4)
		if _, err := s.far.Ask(ctx, "udp", v4); err != nil {
			answers = -1
		}
		cancel()
		if time.Since(began) > limit {
			t.Fatalf("replies are lost %v after the device stopped to send them", limit)
		}
	}
	t.Logf("all replies arrive again after %v", time.Since(began).Round(time.Millisecond))
}

// TestAccelerationBond: XDP forwards on a bond, also after its spare member took over, and handles no packet twice of which the
// network brings the spare member a copy.
func TestAccelerationBond(t *testing.T) {
	const rounds = 10
	kernel.Since(t, 5, 15, "XDP programs of bonds")
	s := newStage(t, lab.Options{NoOffload: true, XDP: true})
	defer s.end()
	if err := s.node.Bond("bond0"); errors.Is(err, lab.ErrNoBond) {
		lab.SkipOrFailModule(t, err)
	} else if err != nil {
		t.Fatal(err)
	}
	s.start("--ebpf-acceleration=native")
	s.process.serves(t)
	s.process.await(t, "acceleration", s.process.Says(`"XDP forwards packets" device="bond0"`))
	checkAll(t, openFlows(t, s.far.Sandbox, over("tcp", outside(s.node)), s.here, s.there))
	flows := openFlows(t, s.far.Sandbox, over("udp", outside(s.node)), s.here, s.there)
	elsewhere := countTo(flows, s.there)
	forwards := func(when string) error {
		before := counted(t, s.node, "accelerated")
		for range rounds {
			checkAll(t, flows)
		}
		// A request and a reply each; a packet for each next hop is left to the stack once a second.
		n, all := counted(t, s.node, "accelerated")-before, float64(2*rounds*elsewhere)
		if n > all {
			t.Errorf("%s: XDP forwarded %v packets, and there were %v", when, n, all)
		}
		if n < all*0.9 {
			return fmt.Errorf("%s: XDP forwarded %v packets, want %v or more", when, n, all*0.9)
		}
		return nil
	}
	if err := forwards("at the start"); err != nil {
		t.Error(err)
	}
	if _, err := s.lab.Fabric().Down(s.node.FabricLink); err != nil {
		t.Fatal(err)
	}
	for name, to := range over("udp", outside(s.node)) {
		s.await(t, name+" by the spare member", func() error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := s.far.Ask(ctx, "udp", to)
			return err
		})
	}
	s.await(t, "acceleration of the spare member", func() error { return forwards("with the spare member") })
}

// countTo is how many flows go to a pod.
func countTo(flows []flow, p *lab.Pod) (n int) {
	for _, f := range flows {
		if f.first.Server == p.Name {
			n++
		}
	}
	return n
}

// needsXDPTarget ends a test where XDP cannot redirect packets to a device of a node.
func needsXDPTarget(t *testing.T, n *lab.Node, device string) {
	t.Helper()
	var targets map[int]bool
	var index int
	err := n.Do(func() error {
		link, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		index = link.Attrs().Index
		targets, err = xdp.Targets(t.Context())
		return err
	})
	switch {
	case err != nil:
		t.Fatal(err)
	case targets == nil && !kernel.AtLeast(t, 6, 3):
		t.Skip("missing: a kernel that tells which devices XDP can redirect to (Linux 6.3)")
	case !targets[index]:
		t.Fatalf("XDP cannot redirect to %s (%d), but to %v", device, index, targets)
	}
}

// TestAccelerationForeign: a foreign program on the device stays, is named, and the device is served without XDP.
func TestAccelerationForeign(t *testing.T) {
	s := newStage(t)
	defer s.end()
	foreign, err := lab.PassingXDP("foreign")
	if err != nil {
		t.Fatal(err)
	}
	defer foreign.Close()
	err = s.node.Do(func() error {
		link, err := netlink.LinkByName(lab.Uplink)
		if err == nil {
			err = xdp.Attach(link.Attrs().Index, foreign, nil)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	s.start("--ebpf-acceleration=native")
	s.process.await(t, "the name of the other program", s.process.Says("cannot forward by XDP: the device has another program: foreign (id "))
	s.process.serves(t)
	s.await(t, "the status", func() error {
		text, err := s.node.Fetch(t.Context(), 10249, "/debug/status")
		if err == nil && !strings.Contains(text, "XDP does not forward on eth0: the device has another program: foreign") {
			err = errors.New(text)
		}
		return err
	})
	flows := openFlows(t, s.far.Sandbox, outside(s.node), s.here, s.there)
	checkAll(t, flows)
	s.end()
	if _, name := onUplink(t, s.node); name != "foreign" {
		t.Errorf("after --cleanup, the device has %q", name)
	}
}

// TestAccelerationTransfers: large transfers are whole, and their checksums right, as the receiver checks them.
func TestAccelerationTransfers(t *testing.T) {
	for mode, flags := range accelerated {
		t.Run(mode, func(t *testing.T) {
			s := newDirectStage(t, serveBulk, lab.Options{NoOffload: true, XDP: true})
			defer s.end(t)
			s.startAll(t, append(slices.Clone(flags), "--ebpf-acceleration=native")...)
			if mode != "snat" {
				s.ready(t, 0, 4)
			}
			for name, to := range outside(s.nodes[0]) {
				if name[:3] == "tcp" {
					if err := s.far.Bulk(t.Context(), to, 4<<20); err != nil {
						t.Errorf("%s: %v", name, err)
					}
					continue
				}
				c, err := s.far.Dial(t.Context(), "udp", to)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				for _, size := range []int{1, 64, 1399, 4000} {
					// The client learns the MTU by its first datagram that is too large.
					await(t, fmt.Sprintf("%s, %d bytes", name, size), func() error { return lab.EchoConn(t.Context(), c, size) })
				}
			}
			if counted(t, s.nodes[0], "accelerated") < 1000 {
				t.Error("XDP forwarded few packets")
			}
		})
	}
}

// TestAccelerationNeighbour: a next hop that gets another link-layer address is found again, although the kernel sees few of the packets for it.
func TestAccelerationNeighbour(t *testing.T) {
	s := newDirectStage(t, serve, lab.Options{NoOffload: true, XDP: true})
	defer s.end(t)
	s.startAll(t, "--ebpf-acceleration=native")
	ways := over("udp4", outside(s.nodes[0])) // TCP would wait longer and longer before it sends again
	flows := openFlows(t, s.far.Sandbox, ways, s.pods...)
	before := counted(t, s.nodes[0], "accelerated")
	checkAll(t, flows)
	if counted(t, s.nodes[0], "accelerated") == before {
		t.Fatal("XDP forwarded nothing")
	}
	// So that the kernel asks a neighbour within seconds, once it has packets for it.
	err := s.nodes[0].Do(func() error {
		for name, value := range map[string]string{"base_reachable_time_ms": "1000", "delay_first_probe_time": "1"} {
			if err := os.WriteFile("/proc/sys/net/ipv4/neigh/"+lab.Uplink+"/"+name, []byte(value), 0); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	// As after a fail-over of a router whose announcement was lost, and which need not ask for the node's address.
	moved := 0
	err = s.lab.Fabric().Do(func() error {
		known, err := netlink.NeighList(0, netlink.FAMILY_V4)
		if err != nil {
			return err
		}
		for _, n := range known {
			if !n.IP.Equal(s.nodes[0].Addr4.AsSlice()) {
				continue
			}
			link, err := netlink.LinkByIndex(n.LinkIndex)
			if err != nil {
				return err
			}
			mac := slices.Clone(link.Attrs().HardwareAddr)
			mac[4] ^= 0x55
			n.State, n.Flags = netlink.NUD_PERMANENT, 0
			if err := errors.Join(netlink.LinkSetHardwareAddr(link, mac), netlink.NeighSet(&n)); err != nil {
				return err
			}
			moved++
		}
		return nil
	})
	if err != nil || moved == 0 {
		t.Fatalf("%d devices got another address: %v", moved, err)
	}
	for i, f := range flows {
		await(t, fmt.Sprintf("flow %d", i), func() error {
			r, err := lab.AskConn(t.Context(), f)
			if err == nil && r != f.first {
				err = fmt.Errorf("%v, first %v", r, f.first)
			}
			return err
		})
	}
}
