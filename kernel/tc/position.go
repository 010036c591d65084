// SPDX-License-Identifier: Apache-2.0

package tc

import (
	"errors"
	"fmt"
	"slices"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ErrNoRoomAhead means that no filter can run before a foreign one, which has priority 1.
var ErrNoRoomAhead = errors.New("a foreign filter has priority 1, and none can run before it")

// Position is the place of a program among all programs of a device and direction.
type Position struct {
	// Attached says that the program is there.
	Attached bool
	// Ahead are the foreign programs that run before it, by name and id. One that returns
	// anything but "next" hides the packet from those after it.
	Ahead []string
}

// Look returns the position of the first attachment of any of these programs by one method.
// It costs two system calls for tcx, and a list of the filters for clsact, so it can run
// every second. Unlike Find it opens no program, unless there is one ahead.
func Look(device int, d Direction, m Method, ids ...ciliumebpf.ProgramID) (p Position, err error) {
	step := "look for a program on " + where(device, d, m)
	var ahead []ciliumebpf.ProgramID
	if m == Clsact {
		ahead, p.Attached, err = lookFilters(device, d, ids)
	} else {
		ahead, p.Attached, err = lookTCX(device, d, ids)
	}
	if err != nil {
		return Position{}, failed(step, err)
	}
	if !p.Attached {
		// A deleted device looks like one without programs.
		_, err := netlink.LinkByIndex(device)
		return Position{}, failed(step, err)
	}
	for _, id := range ahead {
		p.Ahead = append(p.Ahead, describe(id))
	}
	return p, nil
}

// lookTCX returns the programs that run before the proxy's, or all programs if the proxy's are not attached.
func lookTCX(device int, d Direction, ids []ciliumebpf.ProgramID) (ahead []ciliumebpf.ProgramID, attached bool, err error) {
	result, err := link.QueryPrograms(link.QueryOptions{Target: device, Attach: d.attachType()})
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, link.ErrNotSupported), errors.Is(err, unix.ENOENT):
		return nil, false, nil // as in findTCX
	case err != nil:
		return nil, false, err
	}
	for _, at := range result.Programs {
		if slices.Contains(ids, at.ID) {
			return ahead, true, nil
		}
		ahead = append(ahead, at.ID)
	}
	return ahead, false, nil
}

// lookFilters counts tcx programs as ahead, which run before all filters, and those foreign
// filters that can match every packet.
func lookFilters(device int, d Direction, ids []ciliumebpf.ProgramID) (ahead []ciliumebpf.ProgramID, attached bool, err error) {
	if ahead, _, err = lookTCX(device, d, nil); err != nil {
		return nil, false, err
	}
	filters, err := netlink.FilterList(linkOf(device), d.parent())
	if err != nil {
		return nil, false, err
	}
	first := uint16(0) // the lowest priority of the proxy's filters
	for _, f := range filters {
		if bpf, ok := f.(*netlink.BpfFilter); ok && slices.Contains(ids, ciliumebpf.ProgramID(bpf.Id)) && (first == 0 || bpf.Priority < first) {
			first = bpf.Priority
		}
	}
	if first == 0 {
		return nil, false, nil
	}
	for _, f := range filters {
		if id, can := takesAll(f); can && f.Attrs().Priority < first {
			ahead = append(ahead, id)
		}
	}
	return ahead, true, nil
}

// takesAll reports whether a filter can match every packet. The id is 0 if it is no program.
func takesAll(f netlink.Filter) (id ciliumebpf.ProgramID, can bool) {
	switch f := f.(type) {
	case *netlink.BpfFilter:
		return ciliumebpf.ProgramID(f.Id), true
	case *netlink.MatchAll:
		return 0, true
	}
	return 0, false
}

// describe names a program.
func describe(id ciliumebpf.ProgramID) string {
	if id == 0 {
		return "a matchall filter"
	}
	program, err := ciliumebpf.NewProgramFromID(id)
	if err == nil {
		defer program.Close()
		if info, err := program.Info(); err == nil && info.Name != "" {
			return fmt.Sprintf("%s (id %d)", info.Name, id)
		}
	}
	return fmt.Sprintf("program %d", id)
}

// MoveFirst attaches a program ahead of all others, and then detaches the earlier ones, which
// are the result of Find. In between, both see each packet, as when the method changes. For
// tcx it has to be another program than the one that is attached, such as a second load of
// the same: the kernel neither moves a program nor attaches it twice.
//
// Filters move to the priority before the first foreign one: ErrNoRoomAhead if that is 1.
func MoveFirst(device int, d Direction, m Method, p *ciliumebpf.Program, earlier []Attachment) error {
	var err error
	if m == Clsact {
		err = moveFilterFirst(device, d, p, earlier)
	} else {
		err = attachTCX(device, d, p, nil)
	}
	if err != nil {
		return failed("move first: attach "+where(device, d, m), err)
	}
	var errs []error
	for _, e := range earlier {
		errs = append(errs, Detach(e))
	}
	return errors.Join(errs...)
}

func moveFilterFirst(device int, d Direction, p *ciliumebpf.Program, earlier []Attachment) error {
	filters, err := netlink.FilterList(linkOf(device), d.parent())
	if err != nil {
		return fmt.Errorf("list filters: %w", err)
	}
	isEarlier := func(f netlink.Filter) bool {
		return slices.ContainsFunc(earlier, func(e Attachment) bool {
			return e.Method == Clsact && e.filter.Priority == f.Attrs().Priority && e.filter.Handle == f.Attrs().Handle
		})
	}
	place := uint16(priority)
	for _, f := range filters {
		if _, can := takesAll(f); can && !isEarlier(f) && f.Attrs().Priority <= place {
			place = f.Attrs().Priority - 1
		}
	}
	if place == 0 {
		return ErrNoRoomAhead
	}
	return addFilter(device, d, p, place)
}
