// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
)

// Random histories beside another proxy: the fast tier has every frontend of its share that it can
// serve, and no other one; the rest has a reason. Unallocated ClusterIPs are rejected only
// while it has all ClusterIPs, and none can be unknown.
func TestShared(t *testing.T) {
	shares := [][]proxier.Kind{proxier.Kinds(), {proxier.ClusterIP}, {proxier.ExternalIP, proxier.NodePort}, {proxier.ClusterIP, proxier.ExternalIP}}
	for seed := range uint64(100) {
		random := rand.New(rand.NewPCG(seed, 3))
		kinds := shares[seed%uint64(len(shares))]
		var share proxier.Share
		for _, k := range kinds {
			share.Kinds[k] = true
		}
		b := newBench(t, 0)
		b.fast.room = random.IntN(12) // 0 is without bounds
		b.fast.changed = func() {}
		b.fast.refuses = func(d *proxier.Decision, _ *proxier.Frontend) error {
			if d.Name.Protocol == proxier.SCTP {
				return errFull
			}
			return nil
		}
		b.tier = NewShared(b.fast, share)
		b.tier.grace = 0
		b.moving = true // compare is for two datapaths of this proxy
		b.sync(true)
		for range 30 {
			var changes []proxier.PortChange
			if i := 1 + random.IntN(20); random.IntN(3) > 0 {
				changes = append(changes, b.decide(random, i))
			}
			b.sync(random.IntN(4) == 0, changes...)
			has, foreignClusterIPs := served(b.fast), !share.Has(proxier.ClusterIP)
			for _, d := range b.wanted {
				for i := range d.Frontends {
					f := &d.Frontends[i]
					ours := slices.Contains(kinds, f.Kind) && b.fast.Supports(d, f) == nil && !d.OptedOut && b.tier.overflow[d.Index()] == nil
					if (has[keyOf(d, f)] != nil) != ours {
						t.Errorf("%s: in the fast tier %v, want %v", keyOf(d, f), !ours, ours)
					}
					if why := b.tier.Why(d, f); (why == nil) != ours {
						t.Errorf("%s: the reason is %v, served %v", keyOf(d, f), why, ours)
					}
					if b.tier.Supports(d, f) != nil {
						t.Errorf("%s: nothing serves it", keyOf(d, f))
					}
					foreignClusterIPs = foreignClusterIPs || !ours && f.Kind == proxier.ClusterIP
				}
			}
			if rejects := len(b.fast.rules.Unserved) > 0; rejects == foreignClusterIPs {
				t.Errorf("unallocated ClusterIPs are rejected: %v, while the other proxy may serve ClusterIPs: %v", rejects, foreignClusterIPs)
			}
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}
