// SPDX-License-Identifier: Apache-2.0

package tc

import (
	"errors"
	"fmt"
	"strings"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// filterName is the prefix of the names of the proxy's filters.
	filterName = "tdm_"
	// priority and handle place the proxy's filters before nearly all foreign ones,
	// and avoid the usual priorities of those: 1, and 49152 and below.
	priority = 7
	handle   = 0x74646d // "tdm"
)

// parent returns the handle of the qdisc's side, to which filters refer.
func (d Direction) parent() uint32 {
	if d == Egress {
		return netlink.HANDLE_MIN_EGRESS
	}
	return netlink.HANDLE_MIN_INGRESS
}

func linkOf(device int) netlink.Link {
	return &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: device}}
}

func clsactOf(device int) *netlink.Clsact {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: device, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
}

func findFilters(device int, d Direction, ours func(*ciliumebpf.Program) bool) (found []Attachment, err error) {
	filters, err := netlink.FilterList(linkOf(device), d.parent())
	if err != nil {
		return nil, fmt.Errorf("list filters: %w", err)
	}
	for _, f := range filters {
		bpf, ok := f.(*netlink.BpfFilter)
		if !ok || !strings.HasPrefix(bpf.Name, filterName) {
			continue
		}
		program, err := openIfOwn(ciliumebpf.ProgramID(bpf.Id), ours)
		if err != nil {
			return found, err
		}
		if program != nil {
			found = append(found, Attachment{Device: device, Direction: d, Method: Clsact, Program: program, filter: bpf.FilterAttrs})
		}
	}
	if len(found) > 0 && d == Egress {
		// An ingress qdisc lists its filters for either side.
		if kind, err := qdiscKind(device); err != nil || kind != "clsact" {
			Close(found)
			return nil, err
		}
	}
	return found, nil
}

// qdiscKind returns the kind of the qdisc that has the filters of a device: clsact,
// ingress, or empty if there is none.
func qdiscKind(device int) (string, error) {
	q, err := filterQdisc(device)
	if q == nil {
		return "", err
	}
	return q.Type(), nil
}

func filterQdisc(device int) (netlink.Qdisc, error) {
	list, err := netlink.QdiscList(linkOf(device))
	if err != nil {
		return nil, fmt.Errorf("list qdiscs: %w", err)
	}
	for _, q := range list {
		if q.Attrs().Parent == netlink.HANDLE_CLSACT {
			return q, nil
		}
	}
	return nil, nil
}

// attachFilter adds or replaces a filter. The kernel swaps the program of a filter with
// the same priority and handle atomically.
func attachFilter(device int, d Direction, p *ciliumebpf.Program, replaced *Attachment) error {
	if replaced != nil {
		filter := newFilter(device, d, p, priority)
		filter.FilterAttrs = replaced.filter
		return netlink.FilterReplace(filter)
	}
	if err := ensureQdisc(device, d); err != nil {
		return err
	}
	if err := addFilter(device, d, p, priority); err != nil {
		return errors.Join(err, removeIdleQdisc(device))
	}
	return nil
}

func newFilter(device int, d Direction, p *ciliumebpf.Program, place uint16) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: device, Parent: d.parent(), Priority: place, Handle: handle, Protocol: unix.ETH_P_ALL,
		},
		Fd: p.FD(), Name: filterName + d.String(), DirectAction: true,
	}
}

// addFilter never replaces: a filter with the same handle is foreign.
func addFilter(device int, d Direction, p *ciliumebpf.Program, place uint16) error {
	err := netlink.FilterAdd(newFilter(device, d, p, place))
	if errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EINVAL) {
		err = fmt.Errorf("%w: another filter may have priority %d (see tc filter show)", err, place)
	}
	return err
}

func ensureQdisc(device int, d Direction) error {
	err := netlink.QdiscAdd(clsactOf(device))
	if err == nil {
		return nil
	}
	if !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add clsact qdisc: %w", err)
	}
	kind, err := qdiscKind(device)
	if err != nil {
		return err
	}
	if kind != "clsact" && d == Egress {
		return fmt.Errorf("the device has a qdisc of kind %s, which has no egress filters", kind)
	}
	return nil
}

// detachFilter deletes a filter. It requires priority and handle: with a priority of 0,
// the kernel deletes all filters.
func detachFilter(a Attachment) error {
	if a.filter.Priority == 0 || a.filter.Handle == 0 {
		return errors.New("the attachment is not a result of Find")
	}
	err := netlink.FilterDel(&netlink.BpfFilter{FilterAttrs: a.filter, Fd: -1})
	switch {
	case errors.Is(err, unix.ENOENT):
	case errors.Is(err, unix.EINVAL):
		// Without a qdisc there are no filters.
		if kind, kerr := qdiscKind(a.Device); kerr != nil || kind != "" {
			return errors.Join(err, kerr)
		}
		return nil
	case err != nil:
		return err
	}
	return removeIdleQdisc(a.Device)
}

// removeIdleQdisc removes a clsact qdisc without filters, even if it is foreign. The
// kernel does not record who created a qdisc, and the proxy's must not stay forever. A
// foreign qdisc without filters does nothing, and its owner must expect that it is
// missing, as on a new device: all known users add it before each filter, and retry if
// that fails. A filter that is added between the check and the removal is lost, but that
// window of microseconds exists only when the proxy's filter is removed.
func removeIdleQdisc(device int) error {
	q, err := filterQdisc(device)
	if err != nil || q == nil || q.Type() != "clsact" || q.Attrs().IngressBlock != nil {
		return err
	}
	for _, d := range []Direction{Ingress, Egress} {
		filters, err := netlink.FilterList(linkOf(device), d.parent())
		if err != nil {
			return fmt.Errorf("list filters: %w", err)
		}
		if len(filters) > 0 {
			return nil
		}
	}
	err = netlink.QdiscDel(clsactOf(device))
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) {
		return nil // removed in the meantime
	}
	return err
}
