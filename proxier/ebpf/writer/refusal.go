// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"errors"
	"fmt"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// refusal is why a service port is not fully programmed. Trying again does not help before
// something else changes.
type refusal interface {
	error
	code() lbmap.Refusal
}

func (e *CapacityError) code() lbmap.Refusal {
	switch e.Table {
	case "frontends":
		return lbmap.RefusalFrontendsFull
	case "services":
		return lbmap.RefusalServicesFull
	case "backends":
		return lbmap.RefusalBackendsFull
	case "ranges":
		return lbmap.RefusalRangesFull
	}
	return lbmap.RefusalSlotsFull
}

// unsupportedError says that the tier cannot serve a service port at all.
type unsupportedError struct{ protocol proxier.Protocol }

func (e unsupportedError) Error() string {
	return fmt.Sprintf("the eBPF datapath does not support %s", e.protocol)
}

func (e unsupportedError) code() lbmap.Refusal { return lbmap.RefusalSCTP }

// Supports says why the datapath cannot serve a frontend; nil if it can.
func Supports(d *proxier.Decision, f *proxier.Frontend) error {
	if f.IsLeft() {
		return errors.New(f.Left.Why)
	}
	return supports(d)
}

// supports says why the datapath cannot serve a service port at all; nil if it can.
func supports(d *proxier.Decision) error {
	if d.Name.Protocol == proxier.SCTP {
		return unsupportedError{d.Name.Protocol}
	}
	return nil
}

// refuse records and reports a refusal. What the tables have of the service port stays, except
// for removed backends.
func (w *Writer) refuse(index uint32, why refusal) {
	item := w.ports.Get(index)
	d, p := item.Desired(), &item.Applied
	if p.id != 0 {
		w.withdrawBackends(d, p)
		w.dropUnwanted(d, p)
	}
	w.ports.Refused(index, why)
	if full := (*CapacityError)(nil); errors.As(why, &full) && w.fitsLater(full) {
		w.short = true
		return
	}
	if !w.describe(d, p, lbmap.ServiceNotProgrammed, uint16(why.code())) {
		return // as it was
	}
	reason := proxier.ReasonCapacity
	if errors.As(why, &unsupportedError{}) {
		reason = proxier.ReasonUnsupported
	}
	problem := d.Problem(reason)
	problem.Message = fmt.Sprintf("%s/%s is not fully programmed: %v", d.Name, d.Name.Protocol, why)
	w.report(problem)
}

// dropUnwanted deletes the addresses that the service port no longer has, because another one may be
// about to get them.
func (w *Writer) dropUnwanted(d *proxier.Decision, p *port) {
	wants := func(f lbmap.FrontendEntry) bool {
		for i := range d.Frontends {
			if served(&d.Frontends[i]) && lbmap.KeyOf(d, i) == f.Key {
				return true
			}
		}
		return false
	}
	kept := make([]lbmap.FrontendEntry, 0, len(p.frontends))
	for _, f := range p.frontends {
		if wants(f) {
			kept = append(kept, f)
		} else {
			w.orphans = append(w.orphans, f.Key)
		}
	}
	w.note(p.frontends, kept)
	p.frontends = kept
}

// CapacityError says that something does not fit into a table.
type CapacityError struct {
	Table string // frontends, services, backends, slots or ranges
	Need  int
	lbmap.Usage
	// Grows says that the table could be larger, but for the memory that all may take.
	Grows bool
}

func (e *CapacityError) Error() string {
	flag := e.Table
	if e.Grows {
		flag = "map-memory"
	}
	return fmt.Sprintf("needs %d more %s, with %d of %d in use; raise --ebpf-max-%s", e.Need, e.Table, e.Used, e.Max, flag)
}
