// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"errors"
	"fmt"
	"slices"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Lacks is why the maps do not lead packets of clients outside from a frontend to the endpoints of its service port; nil if they do.
func (w *Writer) Lacks(d *proxier.Decision, f *proxier.Frontend) error {
	i := slices.IndexFunc(d.Frontends, func(o proxier.Frontend) bool { return o.Addr == f.Addr && o.Kind == f.Kind })
	w.mu.RLock() // otherwise the kernel may reuse the element for another key
	defer w.mu.RUnlock()
	item := w.ports.Get(d.Index())
	if item == nil || i < 0 {
		return errors.New("it is not programmed yet")
	}
	want := lbmap.NewFrontend(d, i, item.Applied.id)
	value, found, err := w.tables.Frontends.Lookup(want.Key)
	switch set := f.Routes[proxier.FromOutside].Set; {
	case err != nil:
		return fmt.Errorf("read the maps of the programs: %w", err)
	case !found:
		return errors.New("the maps of the programs do not have it")
	case value.Service != want.Value.Service:
		return errors.New("the maps of the programs have another Service there")
	case d.IsPlain() && d.Size(set) > 0 && w.published(value.Service, set) == 0:
		return errors.New("the maps of the programs have no endpoint of it")
	}
	return nil
}
