// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
)

// TestLacks: a frontend that is missing in the maps, that leads to another Service, or to no endpoint, is found.
func TestLacks(t *testing.T) {
	tables := lbmap.NewFakeTables(smallSizes)
	h := newHarness(t, tables, smallSizes)
	h.OnServiceAdd(writertest.Service("a", "10.96.0.1"))
	h.OnEndpointSliceAdd(writertest.Slice("a-1", "a", "10.244.0.1"))
	h.sync(t)
	d := h.Table().All()[0].New
	f := &d.Frontends[0]
	check := func(want string) {
		t.Helper()
		got := ""
		if err := h.writer.Lacks(d, f); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	check("")
	entry := lbmap.NewFrontend(d, 0, h.writer.ports.Get(d.Index()).Applied.id)
	word := &tables.Sets[entry.Value.Service*lbmap.SetsPerService+uint32(f.Routes[proxier.FromOutside].Set)]
	before := *word
	*word = 0
	check("the maps of the programs have no endpoint of it")
	*word = before
	other := entry.Value
	other.Service++
	if _, err := tables.Frontends.Update([]lbmap.FrontendKey{entry.Key}, []lbmap.FrontendValue{other}); err != nil {
		t.Fatal(err)
	}
	check("the maps of the programs have another Service there")
	if err := tables.Frontends.Delete([]lbmap.FrontendKey{entry.Key}); err != nil {
		t.Fatal(err)
	}
	check("the maps of the programs do not have it")
}
