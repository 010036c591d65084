// SPDX-License-Identifier: Apache-2.0

//go:build linux

package tc

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// deadline bounds every wait. Passing tests need far less.
const deadline = 20 * time.Second

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

// node is a lab node with a pod. The device is the node's end of the pod's link.
type node struct {
	t      testing.TB
	at     *lab.Node
	pod    *lab.Pod
	link   netlink.Link
	device int
	counts *ciliumebpf.Map
}

// Slots of the map in which programs count packets.
const (
	first, second      = 0, 1 // the proxy's programs
	foreign1           = 2
	foreign2           = 3
	covered, uncovered = 4, 5 // packets with and without the mark, see witness
	slots              = 6
)

func newNode(t testing.TB) *node {
	t.Helper()
	n := &node{t: t, at: lab.NewT(t).Node("node1")}
	n.pod = n.at.Pod("pod1")
	var err error
	if n.link, err = n.at.Netlink().LinkByName(n.pod.HostLink); err != nil {
		t.Fatal(err)
	}
	n.device = n.link.Attrs().Index
	n.counts, err = ciliumebpf.NewMap(&ciliumebpf.MapSpec{Type: ciliumebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: slots})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.counts.Close() })
	return n
}

// do runs fn in the node's network namespace.
func (n *node) do(fn func() error) {
	n.t.Helper()
	if err := n.at.Do(fn); err != nil {
		n.t.Fatal(err)
	}
}

const (
	payloadLen = 777 // of the packets that are counted
	packetLen  = payloadLen + 14 + 20 + 8
	seenMark   = 0x7d
)

// Offsets in struct __sk_buff.
const skbLen, skbMark = 0, 8

// Verdicts: let the next program see the packet, or accept it for all of them.
const next, ok = -1, 0

// load loads a program that marks the test's packets, counts them in a slot, and lets the next
// program see them.
func (n *node) load(name string, slot int32) *ciliumebpf.Program {
	n.t.Helper()
	return n.program(name, next, asm.Instructions{
		asm.StoreImm(asm.R10, -4, int64(slot), asm.Word),
		asm.Mov.Imm(asm.R1, seenMark),
		asm.StoreMem(asm.R6, skbMark, asm.R1, asm.Word),
	})
}

// witness loads a program that counts packets with and without the mark. It runs last, so that
// packets without the mark have bypassed the proxy's programs.
func (n *node) witness() *ciliumebpf.Program {
	n.t.Helper()
	return n.program("witness", next, asm.Instructions{
		asm.StoreImm(asm.R10, -4, covered, asm.Word),
		asm.LoadMem(asm.R1, asm.R6, skbMark, asm.Word),
		asm.JEq.Imm(asm.R1, seenMark, "count"),
		asm.StoreImm(asm.R10, -4, uncovered, asm.Word),
	})
}

// program loads a program that returns one verdict for every packet. choose puts the number of the
// slot on the stack in which the test's packets are counted.
func (n *node) program(name string, verdict int32, choose asm.Instructions) *ciliumebpf.Program {
	n.t.Helper()
	program, err := ciliumebpf.NewProgram(countingProgram(name, n.counts, verdict, choose))
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { program.Close() })
	return program
}

func countingProgram(name string, counts *ciliumebpf.Map, verdict int32, choose asm.Instructions) *ciliumebpf.ProgramSpec {
	insns := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R1, asm.R6, skbLen, asm.Word),
		asm.JNE.Imm(asm.R1, packetLen, "return"),
	}
	insns = append(insns, choose...)
	insns = append(insns,
		asm.LoadMapPtr(asm.R1, counts.FD()).WithSymbol("count"),
		asm.Mov.Reg(asm.R2, asm.R10),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "return"),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, verdict).WithSymbol("return"),
		asm.Return(),
	)
	return &ciliumebpf.ProgramSpec{Name: name, Type: ciliumebpf.SchedCLS, Instructions: insns}
}

func ours(p *ciliumebpf.Program) bool { return strings.HasPrefix(nameOf(p), "tdm_") }

func nameOf(p *ciliumebpf.Program) string {
	info, err := p.Info()
	if err != nil {
		return err.Error()
	}
	return info.Name
}

// find returns the proxy's attachments, and their names, such as "tcx:tdm_a".
func (n *node) find(d Direction) (list []Attachment, text string) {
	n.t.Helper()
	n.do(func() (err error) {
		list, err = Find(n.device, d, ours)
		return err
	})
	n.t.Cleanup(func() { Close(list) })
	var words []string
	for _, a := range list {
		words = append(words, a.Method.String()+":"+nameOf(a.Program))
	}
	return list, strings.Join(words, " ")
}

func (n *node) wantFound(d Direction, want string) []Attachment {
	n.t.Helper()
	list, got := n.find(d)
	if got != want {
		n.t.Fatalf("found on %s %q, want %q", d, got, want)
	}
	return list
}

func (n *node) attach(d Direction, m Method, p *ciliumebpf.Program, earlier []Attachment) {
	n.t.Helper()
	n.do(func() error { return Attach(n.device, d, m, p, earlier) })
}

func (n *node) detach(list ...Attachment) {
	n.t.Helper()
	for _, a := range list {
		n.do(func() error { return Detach(a) })
	}
}

func (n *node) count(slot uint32) (count uint64) {
	n.t.Helper()
	if err := n.counts.Lookup(slot, &count); err != nil {
		n.t.Fatal(err)
	}
	return count
}

// qdisc returns the kind of the qdisc for filters, or "" if there is none.
func (n *node) qdisc() (kind string) {
	n.t.Helper()
	n.do(func() (err error) {
		kind, err = qdiscKind(n.device)
		return err
	})
	return kind
}

// foreignFilter attaches a foreign filter to a clsact qdisc.
func (n *node) foreignFilter(d Direction, p *ciliumebpf.Program, priority uint16, name string) *netlink.BpfFilter {
	n.t.Helper()
	f := &netlink.BpfFilter{
		FilterAttrs:  netlink.FilterAttrs{LinkIndex: n.device, Parent: d.parent(), Priority: priority, Handle: 1, Protocol: unix.ETH_P_ALL},
		Fd:           p.FD(),
		Name:         name,
		DirectAction: true,
	}
	nl := n.at.Netlink()
	if err := nl.QdiscAdd(clsactOf(n.device)); err != nil && !errors.Is(err, unix.EEXIST) {
		n.t.Fatal(err)
	}
	if err := nl.FilterAdd(f); err != nil {
		n.t.Fatal(err)
	}
	return f
}

// sender sends the test's packets through the device, in one direction.
type sender struct {
	t    testing.TB
	conn *net.UDPConn
	to   netip.AddrPort
}

// sender returns a sender. For ingress it is in the pod, and sends to an address that the node does
// not forward to. For egress it is on the node.
func (n *node) sender(d Direction) *sender {
	n.t.Helper()
	from, to := n.pod.Sandbox, n.at.PodPrefix4.Addr()
	for range 200 {
		to = to.Next()
	}
	if d == Egress {
		from, to = n.at.Sandbox, n.pod.Addr4
	}
	conn, err := from.ListenUDP(unix.AF_INET)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { conn.Close() })
	return &sender{t: n.t, conn: conn, to: netip.AddrPortFrom(to, 9)}
}

func (s *sender) send() error {
	_, err := s.conn.WriteToUDPAddrPort(make([]byte, payloadLen), s.to)
	return err
}

// counted sends packets until the program of each slot has counted one.
func (n *node) counted(s *sender, slots ...uint32) {
	n.t.Helper()
	for _, slot := range slots {
		before, end := n.count(slot), time.Now().Add(deadline)
		for n.count(slot) == before {
			if time.Now().After(end) {
				n.t.Fatalf("packets are not counted in slot %d", slot)
			}
			if err := s.send(); err != nil {
				n.t.Fatal(err)
			}
		}
	}
}

// notCounted sends packets until the slot of another program has counted them, and expects that this
// slot has not.
func (n *node) notCounted(s *sender, slot, witness uint32) {
	n.t.Helper()
	before := n.count(slot)
	for range 10 {
		n.counted(s, witness)
	}
	if after := n.count(slot); after != before {
		n.t.Errorf("%d packets were counted in slot %d", after-before, slot)
	}
}

// traffic sends until the returned function is called, or the test ends.
func (n *node) traffic(d Direction) (stop func()) {
	s := n.sender(d)
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			if err := s.send(); err != nil {
				s.t.Error(err)
				return
			}
		}
	})
	stop = sync.OnceFunc(func() { close(done); wg.Wait() })
	n.t.Cleanup(stop)
	return stop
}

// awaitMore waits until a slot has counted packets that another goroutine sends.
func (n *node) awaitMore(slot uint32) {
	n.t.Helper()
	before, end := n.count(slot), time.Now().Add(deadline)
	for n.count(slot) == before {
		if time.Now().After(end) {
			n.t.Fatalf("packets are not counted in slot %d", slot)
		}
		time.Sleep(50 * time.Microsecond)
	}
}

// forAll runs a test for each method and direction.
func forAll(t *testing.T, test func(t *testing.T, m Method, d Direction)) {
	for _, m := range []Method{TCX, Clsact} {
		for _, d := range []Direction{Ingress, Egress} {
			t.Run(m.String()+"/"+d.String(), func(t *testing.T) {
				needs(t, m)
				test(t, m, d)
			})
		}
	}
}

// needs skips the test if the kernel lacks one of the methods.
func needs(t *testing.T, methods ...Method) {
	t.Helper()
	if slices.Contains(methods, TCX) {
		kernel.Needs(t, capabilities.TCX)
	}
}

// heldByLink attaches a program through a link, as other software does.
func (n *node) heldByLink(d Direction) (held link.Link) {
	n.t.Helper()
	n.do(func() (err error) {
		held, err = link.AttachTCX(link.TCXOptions{Interface: n.device, Program: n.load("tdm_held", foreign1), Attach: d.attachType()})
		return err
	})
	n.t.Cleanup(func() { held.Close() })
	return held
}

// everything lists all programs and filters of the device, in order.
func (n *node) everything(d Direction) string {
	n.t.Helper()
	var b strings.Builder
	n.do(func() error {
		if kernel.Has(capabilities.TCX) {
			result, err := link.QueryPrograms(link.QueryOptions{Target: n.device, Attach: d.attachType()})
			if err != nil {
				return err
			}
			for _, p := range result.Programs {
				id, _ := p.LinkID()
				fmt.Fprintf(&b, "tcx program %d link %d\n", p.ID, id)
			}
		}
		filters, err := netlink.FilterList(n.link, d.parent())
		for _, f := range filters {
			bpf := f.(*netlink.BpfFilter)
			fmt.Fprintf(&b, "filter %v program %d name %s\n", bpf.FilterAttrs, bpf.Id, bpf.Name)
		}
		return err
	})
	fmt.Fprintf(&b, "qdisc %s\n", n.qdisc())
	return b.String()
}
