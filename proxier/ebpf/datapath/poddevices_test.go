// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"path/filepath"
	"testing"

	"github.com/tandem-proxy/tandem/test/lab"
)

// TestUnknownNamespaces: after a search that failed, a network namespace which was not found is not taken for
// one without devices, until a search succeeds.
func TestUnknownNamespaces(t *testing.T) {
	if err := lab.Available(); err != nil {
		lab.SkipOrFail(t, err)
	}
	const cookie = 1 << 60
	empty := t.TempDir()
	var d PodDevices
	find := func(procRoot string, unknown, fails bool) {
		t.Helper()
		if err := d.find(t.Context(), []uint64{cookie}, procRoot); (err != nil) != fails {
			t.Errorf("error %v", err)
		}
		if d.Unknown(cookie) != unknown {
			t.Errorf("unknown: %v, want %v", !unknown, unknown)
		}
	}
	find(filepath.Join(empty, "missing"), true, true)
	find(empty, true, false) // it does not search again so soon
	d.looked = d.looked.Add(-retryInterval)
	find(empty, false, false)
	find(filepath.Join(empty, "missing"), false, false)
}
