// SPDX-License-Identifier: Apache-2.0

//go:build linux

package tc

import (
	"errors"
	"strings"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
)

func (n *node) look(d Direction, m Method, programs ...*ciliumebpf.Program) (p Position) {
	n.t.Helper()
	var ids []ciliumebpf.ProgramID
	for _, program := range programs {
		info, err := program.Info()
		if err != nil {
			n.t.Fatal(err)
		}
		id, _ := info.ID()
		ids = append(ids, id)
	}
	n.do(func() (err error) {
		p, err = Look(n.device, d, m, ids...)
		return err
	})
	return p
}

// attachAhead attaches a foreign program ahead of all others.
func (n *node) attachAhead(d Direction, m Method, p *ciliumebpf.Program) {
	n.t.Helper()
	if m == Clsact {
		n.foreignFilter(d, p, priority-1, "foreign")
		return
	}
	n.do(func() error {
		return link.RawAttachProgram(link.RawAttachProgramOptions{Target: n.device, Program: p, Attach: d.attachType(), Anchor: link.Head()})
	})
}

// TestMoveFirst: a foreign program ahead that accepts packets hides them from the proxy's program,
// until that moves. No packet misses the proxy's program while it moves.
func TestMoveFirst(t *testing.T) {
	forAll(t, func(t *testing.T, m Method, d Direction) {
		n := newNode(t)
		s := n.sender(d)
		one, again := n.load("tdm_one", first), n.load("tdm_one", second)
		if p := n.look(d, m, one); p.Attached {
			t.Errorf("before: %+v", p)
		}
		n.attach(d, m, one, nil)
		n.counted(s, first)
		if p := n.look(d, m, again, one); !p.Attached || len(p.Ahead) > 0 {
			t.Errorf("attached: %+v", p)
		}

		n.attachAhead(d, m, n.program("hides", ok, asm.Instructions{asm.StoreImm(asm.R10, -4, foreign1, asm.Word)}))
		n.notCounted(s, first, foreign1)
		p := n.look(d, m, one, again)
		if !p.Attached || len(p.Ahead) != 1 || !strings.HasPrefix(p.Ahead[0], "hides (id ") {
			t.Errorf("behind: %+v", p)
		}

		list := n.wantFound(d, m.String()+":tdm_one")
		n.do(func() error { return MoveFirst(n.device, d, m, again, list) })
		n.counted(s, second, foreign1)
		n.notCounted(s, first, second)
		list = n.wantFound(d, m.String()+":tdm_one")
		if p := n.look(d, m, one, again); !p.Attached || len(p.Ahead) > 0 {
			t.Errorf("moved: %+v", p)
		}

		// Once more with a program behind it, while packets are sent.
		n.attachSecondAhead(d, m)
		stop := n.traffic(d)
		n.awaitMore(second)
		n.do(func() error { return MoveFirst(n.device, d, m, one, list) })
		n.awaitMore(first)
		stop()
		n.detach(n.wantFound(d, m.String()+":tdm_one")...)
		if p := n.look(d, m, one, again); p.Attached {
			t.Errorf("detached: %+v", p)
		}
	})
}

// attachSecondAhead attaches a second foreign program ahead, which lets the next one see packets.
func (n *node) attachSecondAhead(d Direction, m Method) {
	n.t.Helper()
	p := n.program("sees", next, asm.Instructions{asm.StoreImm(asm.R10, -4, foreign2, asm.Word)})
	if m == Clsact {
		n.foreignFilter(d, p, priority-3, "foreign2")
		return
	}
	n.attachAhead(d, m, p)
}

// TestNoRoomAhead: no filter can run before one of priority 1, and the attached one stays.
func TestNoRoomAhead(t *testing.T) {
	n := newNode(t)
	s := n.sender(Ingress)
	one := n.load("tdm_one", first)
	n.attach(Ingress, Clsact, one, nil)
	n.foreignFilter(Ingress, n.program("sees", next, asm.Instructions{asm.StoreImm(asm.R10, -4, foreign1, asm.Word)}), 1, "foreign")
	err := n.at.Do(func() error { return MoveFirst(n.device, Ingress, Clsact, one, nil) })
	if !errors.Is(err, ErrNoRoomAhead) {
		t.Errorf("moved before priority 1: %v", err)
	}
	if p := n.look(Ingress, Clsact, one); !p.Attached || len(p.Ahead) != 1 {
		t.Errorf("%+v", p)
	}
	n.counted(s, first, foreign1)
}

// TestLookAtNoDevice: a device that is gone is told apart from one without programs.
func TestLookAtNoDevice(t *testing.T) {
	n := newNode(t)
	for _, m := range []Method{TCX, Clsact} {
		err := n.at.Do(func() error { _, err := Look(1<<20, Ingress, m, 1); return err })
		if !errors.Is(err, ErrNoDevice) {
			t.Errorf("%s: %v", m, err)
		}
	}
}

// BenchmarkLook is what the position of one program on one device costs.
func BenchmarkLook(b *testing.B) {
	for _, m := range []Method{TCX, Clsact} {
		b.Run(m.String(), func(b *testing.B) {
			n := newNode(b)
			one := n.load("tdm_one", first)
			n.attach(Ingress, m, one, nil)
			info, err := one.Info()
			if err != nil {
				b.Fatal(err)
			}
			id, _ := info.ID()
			n.do(func() error {
				b.ReportAllocs()
				for b.Loop() {
					if p, err := Look(n.device, Ingress, m, id); err != nil || !p.Attached {
						b.Fatal(p, err)
					}
				}
				return nil
			})
		})
	}
}
