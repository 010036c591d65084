// SPDX-License-Identifier: Apache-2.0

package staleudp_test

import (
	"context"
	"errors"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
)

// failing is a tier that fails, or not.
type failing struct {
	proxier.Tier
	err error
}

func (f *failing) Sync(context.Context, proxier.Update) error { return f.err }

// A tier that fails, for whatever reason, keeps no stale flow alive; as its rules may make
// the same one again, they are looked for until it does not fail any more.
func TestBeside(t *testing.T) {
	const stale = "198.51.100.1:4000 10.96.0.10:53 10.244.0.1:53"
	table := makeTable(stale)
	next := &failing{err: errors.New("one device refuses")}
	tier := staleudp.Beside(next, staleudp.New(staleudp.Options{Table: table}))
	sync := func(u *proxier.Update, left int) {
		t.Helper()
		if err := tier.Sync(bg, *u); !errors.Is(err, next.err) {
			t.Errorf("error %v", err)
		}
		if len(table.flows) != left {
			t.Errorf("%d flows are left, want %d", len(table.flows), left)
		}
	}
	before := udp("a", "clusterip 10.96.0.10:53 backend 10.244.0.1:53")
	sync(full(before), 1)
	sync(change(before, nil), 0)
	table.flows = makeTable(stale).flows
	sync(&proxier.Update{}, 0)
	table.flows = makeTable(stale).flows
	next.err = nil
	sync(&proxier.Update{}, 0)
	table.flows = makeTable(stale).flows // of another flow by now
	sync(&proxier.Update{}, 1)
}
