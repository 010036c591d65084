// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"fmt"

	"github.com/tandem-proxy/tandem/proxier"
)

// writer writes the rules of both families.
type writer struct {
	families [proxier.Families]*family // nil where rules cannot be written
	watch    watch
}

func newWriter(opts *Options, usable func(proxier.Family) bool) *writer {
	w := &writer{watch: watch{tools: opts.Tools}}
	for f := range proxier.Families {
		if usable(f) {
			w.families[f] = newFamily(f, opts, &w.watch)
		}
	}
	return w
}

// write writes an update. A family that fails holds up no other; the errors are theirs.
func (w *writer) write(ctx context.Context, u proxier.Update) (errs [proxier.Families]error) {
	read := w.mustRead(&u)
	if read {
		w.watch.begin()
	}
	for name, f := range w.families {
		if f == nil {
			continue
		}
		if err := f.sync(ctx, u, read); err != nil {
			errs[name] = fmt.Errorf("%s rules: %w", f.name, err)
		}
	}
	return errs
}

// mustRead says whether to compare everything with what is in the kernel: in a full sync,
// unless nobody else has changed anything there.
func (w *writer) mustRead(u *proxier.Update) bool {
	read := u.Full && !w.watch.unchanged()
	for _, f := range w.families {
		if f != nil {
			news := f.learn(u.NodeRules)
			read = read || news || !f.whole
		}
	}
	return read
}
