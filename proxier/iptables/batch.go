// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
)

// batchSize is how many chains are written at once. With the nft variant, the time for a
// batch grows with the square of its size, and each batch has the kernel walk all rules that
// exist. The legacy variant reads and writes the whole table for each batch, however small.
func (f *family) batchSize() int {
	if f.opts.Tools.Variant() == xtables.Legacy {
		return 1 << 20
	}
	return 2000
}

// firstBatch is how many service ports the first batch of many has, so that a node that
// starts serves something soon.
const firstBatch = 50

// writePending writes the pending service ports. With hold, shared chains are written later; those
// in the kernel serve meanwhile.
func (f *family) writePending(ctx context.Context, hold bool) error {
	var pending []uint32
	for index := range f.ports.Pending() {
		pending = append(pending, index)
	}
	first := len(pending) > 10*firstBatch
	for len(pending) > 0 {
		n, chains := 0, 0
		for n < len(pending) && chains < f.batchSize() && (!first || n < firstBatch) {
			p := f.ports.Get(pending[n])
			chains += len(p.Applied.chains)
			if p.Wanted() {
				chains += len(p.Desired().Backends) + 2
			}
			n++
		}
		first = false
		if err := f.writePorts(ctx, pending[:n], hold); err != nil {
			return err
		}
		for _, index := range pending[:n] {
			delete(f.rendered, index)
		}
		pending = pending[n:]
	}
	return nil
}

// writePorts writes some service ports at once. If the kernel refuses that, it tries each half, until
// it has found the service port at fault. All others are written.
func (f *family) writePorts(ctx context.Context, list []uint32, hold bool) error {
	c := f.change(list, hold)
	err := f.restore(ctx, c.text)
	if err == nil {
		c.commit()
		for name := range c.emptied {
			f.logReferenced(ctx, name)
		}
		return nil
	}
	c.undo(err)
	var refused *xtables.RestoreError
	switch {
	case !errors.As(err, &refused) || ctx.Err() != nil:
		return err
	case f.noteReferenced(err, c.text) != "":
		return f.writePorts(ctx, list, hold)
	case len(list) > 1:
		half := len(list) / 2
		return errors.Join(f.writePorts(ctx, list[:half], hold), f.writePorts(ctx, list[half:], hold))
	}
	f.refused(ctx, list[0], err)
	return nil
}

// refused reports, once for each decision, that the kernel refuses a service port. It is
// tried again with full syncs.
func (f *family) refused(ctx context.Context, index uint32, err error) {
	f.ports.Refused(index, err)
	p := f.ports.Get(index)
	if !p.Wanted() {
		klog.FromContext(ctx).Error(err, "Cannot remove the rules of a deleted service port, retrying with the next full sync", "family", f.name)
		return
	}
	d := p.Desired()
	if f.opts.Reporter != nil && p.Applied.reported != d {
		problem := d.Problem(proxier.ReasonRulesRefused)
		problem.Message = fmt.Sprintf("port %s over %s: %v; its previous rules stay, other Services are not affected", d.Name.Port, f.name, err)
		f.opts.Reporter.Report(problem)
	}
	p.Applied.reported = d
}
