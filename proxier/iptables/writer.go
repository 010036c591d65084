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

// write writes an update, and returns the error of each family. A failing family does not block the
// other.
func (w *writer) write(ctx context.Context, u proxier.Update) (errs [proxier.Families]error) {
	for name, f := range w.families {
		if f == nil {
			continue
		}
		if err := f.sync(ctx, u); err != nil {
			errs[name] = fmt.Errorf("%s rules: %w", f.name, err)
		}
	}
	return errs
}
