// SPDX-License-Identifier: Apache-2.0

//go:build linux

package tc

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/test/kernel"
)

func TestAttach(t *testing.T) {
	forAll(t, func(t *testing.T, m Method, d Direction) {
		n := newNode(t)
		s := n.sender(d)
		one, two := n.load("tdm_one", first), n.load("tdm_two", second)
		n.wantFound(d, "")
		n.attach(d, m, one, nil)
		n.counted(s, first)

		// The attachment does not depend on a file descriptor of this process.
		one.Close()
		runtime.GC()
		runtime.GC()
		list := n.wantFound(d, m.String()+":tdm_one")
		n.counted(s, first)
		n.wantFound(1-d, "")

		n.attach(d, m, two, list)
		n.counted(s, second)
		n.notCounted(s, first, second)
		list = n.wantFound(d, m.String()+":tdm_two")

		// A program that is attached already stays.
		n.attach(d, m, two, list)
		list = n.wantFound(d, m.String()+":tdm_two")

		n.detach(list...)
		n.wantFound(d, "")
		n.detach(list...)
		if q := n.qdisc(); q != "" {
			t.Errorf("a qdisc of kind %s is left", q)
		}
	})
}

// attachEnv makes TestAttachAndExit attach: "<method> <direction> <device>".
const attachEnv = "TANDEM_TC_TEST_ATTACH"

// TestAttachAndExit is the process that TestOutlivesProcess starts.
func TestAttachAndExit(t *testing.T) {
	var m, d, device int
	if _, err := fmt.Sscan(os.Getenv(attachEnv), &m, &d, &device); err != nil {
		return // an ordinary run
	}
	counts, err := ciliumebpf.NewMap(&ciliumebpf.MapSpec{Name: "counts", Type: ciliumebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: slots})
	if err != nil {
		t.Fatal(err)
	}
	p, err := ciliumebpf.NewProgram(countingProgram("tdm_before", counts, next, asm.Instructions{asm.StoreImm(asm.R10, -4, first, asm.Word)}))
	if err != nil {
		t.Fatal(err)
	}
	if err := Attach(device, Direction(d), Method(m), p, nil); err != nil {
		t.Fatal(err)
	}
}

func TestOutlivesProcess(t *testing.T) {
	forAll(t, func(t *testing.T, m Method, d Direction) {
		n := newNode(t)
		c := n.at.Command(t.Context(), os.Args[0], "-test.run=^TestAttachAndExit$")
		c.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d %d", attachEnv, m, d, n.device))
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		list := n.wantFound(d, m.String()+":tdm_before")
		info, err := list[0].Program.Info()
		if err != nil {
			t.Fatal(err)
		}
		maps, _ := info.MapIDs()
		if len(maps) != 1 {
			t.Fatalf("the program has maps %v", maps)
		}
		mine := n.counts
		if n.counts, err = ciliumebpf.NewMapFromID(maps[0]); err != nil {
			t.Fatal(err)
		}
		defer n.counts.Close()
		s := n.sender(d)
		n.counted(s, first)

		n.counts = mine
		n.attach(d, m, n.load("tdm_after", second), list)
		n.wantFound(d, m.String()+":tdm_after")
		n.counted(s, second)
	})
}

// TestReplaceUnderTraffic: no packet bypasses the programs while they are replaced, by the same
// method or by the other one.
func TestReplaceUnderTraffic(t *testing.T) {
	for _, test := range []struct {
		name         string
		methods      [2]Method // of each program
		replacements int
	}{
		{"tcx", [2]Method{TCX, TCX}, 300},
		{"clsact", [2]Method{Clsact, Clsact}, 300},
		{"method", [2]Method{TCX, Clsact}, 40},
	} {
		for _, d := range []Direction{Ingress, Egress} {
			t.Run(test.name+"/"+d.String(), func(t *testing.T) {
				needs(t, test.methods[:]...)
				n := newNode(t)
				n.foreignFilter(d, n.witness(), 65000, "witness")
				programs := [2]*ciliumebpf.Program{n.load("tdm_first", first), n.load("tdm_second", second)}
				n.attach(d, test.methods[0], programs[0], nil)
				stop := n.traffic(d)
				for i := 1; i <= test.replacements; i++ {
					list, _ := n.find(d)
					if len(list) != 1 {
						t.Errorf("found %v, want one", list)
					}
					n.attach(d, test.methods[i%2], programs[i%2], list)
					Close(list)
					n.awaitMore(uint32(i % 2))
				}
				stop()
				t.Logf("%d packets during %d replacements; %d and %d seen by each program",
					n.count(covered), test.replacements, n.count(first), n.count(second))
				if n.count(uncovered) != 0 || n.count(covered) < uint64(test.replacements) {
					t.Errorf("%d packets passed the programs, %d bypassed them", n.count(covered), n.count(uncovered))
				}
				// A replacement in place handles each packet once. The counts of the last packets may lag.
				once := func() bool { return n.count(first)+n.count(second) == n.count(covered) }
				for end := time.Now().Add(deadline); test.methods[0] == test.methods[1] && !once(); time.Sleep(time.Millisecond) {
					if time.Now().After(end) {
						t.Fatal("packets were handled twice")
					}
				}
			})
		}
	}
}

// TestForeign: foreign programs and filters stay on the device, in the same order, and continue to
// work.
func TestForeign(t *testing.T) {
	forAll(t, func(t *testing.T, m Method, d Direction) {
		n := newNode(t)
		s := n.sender(d)
		tcx, filter := n.load("tdm_theirs", foreign1), n.load("other", foreign2)
		mine := func(p *ciliumebpf.Program) bool { return ours(p) && nameOf(p) != "tdm_theirs" }
		if kernel.Has(capabilities.TCX) {
			n.do(func() error { return attachTCX(n.device, d, tcx, nil) })
			held := n.heldByLink(d)
			defer func() {
				if _, err := held.Info(); err != nil {
					t.Error(err)
				}
			}()
		}
		n.foreignFilter(d, filter, 1, "other")
		n.foreignFilter(d, filter, 49152, filterName+"looks_like_ours")
		n.foreignFilter(d, tcx, priority, filterName+"looks_like_ours")
		n.foreignFilter(d, n.load("tdm_copy", foreign2), 2, "a program of ours")
		before := n.everything(d)

		var list []Attachment
		for i, p := range []*ciliumebpf.Program{n.load("tdm_one", first), n.load("tdm_two", second)} {
			n.do(func() error { return Attach(n.device, d, m, p, list) })
			n.counted(s, uint32(i), foreign1, foreign2)
			n.do(func() (err error) {
				list, err = Find(n.device, d, mine)
				return err
			})
			defer Close(list)
			if len(list) != 1 {
				t.Fatalf("found %v, want one", list)
			}
		}
		n.detach(list...)
		if after := n.everything(d); after != before {
			t.Errorf("before:\n%s\nafter:\n%s", before, after)
		}
		n.counted(s, foreign1, foreign2)
	})
}

// TestOrder: a new program runs before existing foreign ones, which may end the chain.
func TestOrder(t *testing.T) {
	forAll(t, func(t *testing.T, m Method, d Direction) {
		n := newNode(t)
		s := n.sender(d)
		last := n.program("other", ok, asm.Instructions{asm.StoreImm(asm.R10, -4, foreign1, asm.Word)})
		if m == TCX {
			n.do(func() error { return attachTCX(n.device, d, last, nil) })
		} else {
			n.foreignFilter(d, last, 49152, "other")
		}
		n.counted(s, foreign1)
		n.attach(d, m, n.load("tdm_one", first), nil)
		n.counted(s, first, foreign1)
	})
}

// TestSurplus: two processes that start at the same time attach two programs. Attach leaves one.
func TestSurplus(t *testing.T) {
	needs(t, TCX)
	for _, test := range []struct {
		name    string
		program int // of one, two, three
		method  Method
		want    string
	}{
		{"a new one", 2, TCX, "tcx:tdm_three"},
		{"the first", 0, TCX, "tcx:tdm_one"},
		{"the second", 1, TCX, "tcx:tdm_two"},
		{"another method", 2, Clsact, "clsact:tdm_three"},
		{"the one of the other method", 0, Clsact, "clsact:tdm_one"},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := newNode(t)
			programs := []*ciliumebpf.Program{n.load("tdm_one", first), n.load("tdm_two", second), n.load("tdm_three", foreign1)}
			n.attach(Ingress, TCX, programs[1], nil)
			n.attach(Ingress, TCX, programs[0], nil)
			n.attach(Ingress, Clsact, programs[0], nil)
			list := n.wantFound(Ingress, "tcx:tdm_one tcx:tdm_two clsact:tdm_one")
			n.attach(Ingress, test.method, programs[test.program], list)
			n.wantFound(Ingress, test.want)
			if q := n.qdisc(); (q != "") != (test.method == Clsact) {
				t.Errorf("qdisc %q", q)
			}
		})
	}
}

func TestDeviceGone(t *testing.T) {
	forAll(t, func(t *testing.T, m Method, d Direction) {
		n := newNode(t)
		p := n.load("tdm_one", first)
		n.attach(d, m, p, nil)
		list := n.wantFound(d, m.String()+":tdm_one")
		if err := n.at.Netlink().LinkDel(n.link); err != nil {
			t.Fatal(err)
		}
		for step, fn := range map[string]func() error{
			"find":    func() error { _, err := Find(n.device, d, ours); return err },
			"attach":  func() error { return Attach(n.device, d, m, p, nil) },
			"replace": func() error { return Attach(n.device, d, m, n.load("tdm_two", second), list) },
			"detach":  func() error { return Detach(list[0]) },
		} {
			if err := n.at.Do(fn); !errors.Is(err, ErrNoDevice) {
				t.Errorf("%s: %v", step, err)
			}
		}
	})
}

// TestIngressQdisc: an ingress qdisc is foreign, and stays. It supports filters in one direction
// only.
func TestIngressQdisc(t *testing.T) {
	n := newNode(t)
	qdisc := &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: n.device, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_INGRESS}}
	if err := n.at.Netlink().QdiscAdd(qdisc); err != nil {
		t.Fatal(err)
	}
	n.attach(Ingress, Clsact, n.load("tdm_one", first), nil)
	n.counted(n.sender(Ingress), first)
	n.wantFound(Egress, "")
	err := n.at.Do(func() error { return Attach(n.device, Egress, Clsact, n.load("tdm_two", second), nil) })
	if err == nil || !strings.Contains(err.Error(), "qdisc of kind ingress") {
		t.Errorf("attach to egress: %v", err)
	}
	n.detach(n.wantFound(Ingress, "clsact:tdm_one")...)
	if q := n.qdisc(); q != "ingress" {
		t.Errorf("the qdisc is %q", q)
	}
}

// TestQdiscStays: the clsact qdisc stays while there are filters in either direction.
func TestQdiscStays(t *testing.T) {
	n := newNode(t)
	f := n.foreignFilter(Egress, n.load("other", foreign1), 1, "other")
	n.attach(Ingress, Clsact, n.load("tdm_one", first), nil)
	n.attach(Egress, Clsact, n.load("tdm_two", second), nil)
	in, out := n.wantFound(Ingress, "clsact:tdm_one"), n.wantFound(Egress, "clsact:tdm_two")
	n.detach(out...)
	n.detach(out...)
	if q := n.qdisc(); q != "clsact" {
		t.Fatalf("the qdisc is %q", q)
	}
	n.counted(n.sender(Ingress), first)
	n.counted(n.sender(Egress), foreign1)
	if err := n.at.Netlink().FilterDel(f); err != nil {
		t.Fatal(err)
	}
	n.detach(in...)
	if q := n.qdisc(); q != "" {
		t.Errorf("the qdisc is %q", q)
	}
	// Detaching succeeds without the qdisc.
	n.detach(in...)
}

// TestSharedBlock: a clsact qdisc that shares its filters with other devices stays.
func TestSharedBlock(t *testing.T) {
	n := newNode(t)
	qdisc, block := clsactOf(n.device), uint32(22)
	qdisc.IngressBlock = &block
	if err := n.at.Netlink().QdiscAdd(qdisc); err != nil {
		t.Fatal(err)
	}
	p := n.load("tdm_one", first)
	if err := n.at.Do(func() error { return Attach(n.device, Ingress, Clsact, p, nil) }); err == nil {
		t.Error("attached to all devices that share the filters")
	}
	n.attach(Egress, Clsact, p, nil)
	n.detach(n.wantFound(Egress, "clsact:tdm_one")...)
	if q := n.qdisc(); q != "clsact" {
		t.Errorf("the qdisc is %q", q)
	}
}

// TestRefused: a refused program, or a foreign filter with the same priority and handle, is an
// error. A failed attempt leaves nothing behind.
func TestRefused(t *testing.T) {
	n := newNode(t)
	closed, other := n.load("tdm_closed", first), n.load("other", foreign1)
	closed.Close()
	if err := n.at.Do(func() error { return Attach(n.device, Ingress, Clsact, closed, nil) }); err == nil {
		t.Error("a closed program was attached")
	}
	if q := n.qdisc(); q != "" {
		t.Errorf("a qdisc of kind %s is left", q)
	}

	f := n.foreignFilter(Ingress, other, priority, "other")
	nl := n.at.Netlink()
	if err := nl.FilterDel(f); err != nil {
		t.Fatal(err)
	}
	f.Handle = handle
	if err := nl.FilterAdd(f); err != nil {
		t.Fatal(err)
	}
	before := n.everything(Ingress)
	err := n.at.Do(func() error { return Attach(n.device, Ingress, Clsact, n.load("tdm_one", first), nil) })
	if !errors.Is(err, unix.EEXIST) || !strings.Contains(err.Error(), "priority 7") {
		t.Errorf("attach beside a filter of the same handle: %v", err)
	}
	if after := n.everything(Ingress); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	if err := Detach(Attachment{Device: n.device, Method: Clsact, Program: other}); err == nil {
		t.Error("a filter without priority and handle was detached")
	}
}
