// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/kernel/tc"
)

const (
	// maxMoves is how often programs move past foreign ones at one place within movesMemory.
	// Software that keeps putting its program first wins after that: two that never give up
	// would change the device for ever.
	maxMoves    = 3
	movesMemory = 10 * time.Minute
)

// ErrContested means that foreign programs were put first again and again.
var ErrContested = errors.New("they were put first again after each repair")

// Trouble is that programs are missing on a device, or that others run before them.
type Trouble struct {
	Device int // its index
	tc.Direction
	// Lost says that the program was not attached. Else Ahead are the foreign programs that
	// run before it, by name and id.
	Lost  bool
	Ahead []string
	// Err is why it remains; nil if it was repaired.
	Err error
}

// String says what is wrong, without the device.
func (t Trouble) String() string {
	if t.Lost {
		return fmt.Sprintf("no program at %s", t.Direction)
	}
	return fmt.Sprintf("at %s, another program runs first: %s", t.Direction, strings.Join(t.Ahead, ", "))
}

// place is a direction on a device.
type place struct {
	device int
	tc.Direction
}

// Audit attaches again what another process detached from devices, and moves programs past
// foreign ones that were attached ahead. Where nothing is wrong, it costs two system calls for
// each direction on a device (tcx).
func (p *Devices) Audit(ctx context.Context) (list []Trouble) {
	for index, v := range p.Served {
		list = append(list, p.auditDevice(ctx, index, v)...)
	}
	slices.SortFunc(list, func(a, b Trouble) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Direction, b.Direction))
	})
	p.forgetMoves(time.Now())
	return list
}

func (p *Devices) auditDevice(ctx context.Context, index int, v Variant) (list []Trouble) {
	lost := false
	for i, h := range PacketHooks {
		position, err := p.look(index, v, i)
		switch {
		case errors.Is(err, tc.ErrNoDevice):
			return nil // which is noticed elsewhere
		case err != nil:
			list = append(list, Trouble{Device: index, Direction: h.Direction, Lost: true, Err: err})
		case !position.Attached:
			lost = true
			list = append(list, Trouble{Device: index, Direction: h.Direction, Lost: true})
		case len(position.Ahead) > 0:
			list = append(list, Trouble{Device: index, Direction: h.Direction, Ahead: position.Ahead, Err: p.moveFirst(ctx, index, v, i)})
		}
	}
	if !lost {
		return list
	}
	// Both directions at once: Attach knows the right order.
	err := p.Attach(ctx, index, v)
	if errors.Is(err, tc.ErrNoDevice) {
		return nil
	}
	for i := range list {
		if list[i].Lost && list[i].Err == nil {
			list[i].Err = err
		}
	}
	return list
}

func (p *Devices) look(index int, v Variant, hook int) (tc.Position, error) {
	var ids []ciliumebpf.ProgramID
	for _, copies := range []*PacketPrograms{p.Loaded[v], p.twins[v]} {
		if copies == nil {
			continue
		}
		id, err := p.idOf(copies[hook])
		if err != nil {
			return tc.Position{}, err
		}
		ids = append(ids, id)
	}
	return tc.Look(index, PacketHooks[hook].Direction, p.opts.TC, ids...)
}

// idOf is the id of a loaded program, which never changes.
func (p *Devices) idOf(program *ciliumebpf.Program) (ciliumebpf.ProgramID, error) {
	if id, known := p.ids[program]; known {
		return id, nil
	}
	info, err := program.Info()
	if err != nil {
		return 0, fmt.Errorf("inspect a packet program: %w", err)
	}
	id, _ := info.ID()
	p.ids[program] = id
	return id, nil
}

// moveFirst moves the program of a hook past foreign ones, unless it was overtaken too often.
func (p *Devices) moveFirst(ctx context.Context, index int, v Variant, hook int) error {
	at, now := place{index, PacketHooks[hook].Direction}, time.Now()
	p.forgetMoves(now)
	if len(p.moves[at]) >= maxMoves {
		return ErrContested
	}
	earlier, err := tc.Find(index, at.Direction, IsOwnProgram)
	if err != nil {
		return err
	}
	defer tc.Close(earlier)
	next := p.Loaded[v][hook]
	if p.opts.TC == tc.TCX {
		if next, err = p.notAttached(ctx, v, hook, earlier); err != nil {
			return err
		}
	}
	if err := tc.MoveFirst(index, at.Direction, p.opts.TC, next, earlier); err != nil {
		return err
	}
	p.moves[at] = append(p.moves[at], now)
	return nil
}

// notAttached returns the program, or its twin, that is not attached: tcx attaches none twice.
func (p *Devices) notAttached(ctx context.Context, v Variant, hook int, attached []tc.Attachment) (*ciliumebpf.Program, error) {
	if p.twins[v] == nil {
		twins, err := p.load(ctx, v)
		if err != nil {
			return nil, err
		}
		p.twins[v] = twins
	}
	for _, program := range []*ciliumebpf.Program{p.Loaded[v][hook], p.twins[v][hook]} {
		id, err := p.idOf(program)
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(attached, func(a tc.Attachment) bool {
			info, err := a.Program.Info()
			if err != nil {
				return false
			}
			other, _ := info.ID()
			return other == id
		}) {
			return program, nil
		}
	}
	return nil, errors.New("both copies of the program are attached")
}

func (p *Devices) forgetMoves(now time.Time) {
	for at, list := range p.moves {
		list = slices.DeleteFunc(list, func(moved time.Time) bool { return now.Sub(moved) >= movesMemory })
		if p.moves[at] = list; len(list) == 0 {
			delete(p.moves, at)
		}
	}
}
