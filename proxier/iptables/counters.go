// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/nfacct"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
)

// Counters are counters of packets in the kernel, by name; nfacct.Kernel has them.
type Counters interface {
	// Ensure makes one unless it is there.
	Ensure(name string) error
	Packets(name string) (uint64, error)
	// Delete deletes one, if it is there; nfacct.ErrInUse says that rules name it.
	Delete(name string) error
}

// Upstream's counters. Whoever takes over from whom goes on counting where the other one was.
const (
	invalidCounter  = "ct_state_invalid_dropped_pkts"
	loopbackCounter = "localhost_nps_accepted_pkts"
)

var counterNames = []string{invalidCounter, loopbackCounter}

// countIn has a rule count the packets that get to this match.
func countIn(name string) string {
	return "-m nfacct --nfacct-name  " + name // iptables-save prints both spaces
}

// Counted are packets that rules have counted.
type Counted struct {
	// InvalidDropped were dropped as conntrack found them invalid.
	InvalidDropped uint64
	// LoopbackNodePorts began connections to NodePorts at loopback addresses.
	LoopbackNodePorts uint64
}

var errNoCounters = errors.New("counters are not wanted")

// ensureCounters makes what is missing.
func ensureCounters(c Counters) error {
	for _, name := range counterNames {
		if err := c.Ensure(name); err != nil {
			return err
		}
	}
	return nil
}

// tryCounters says what keeps rules of a family from counting: an object of the kernel's, or
// the match that names it. A text with a match that is not there would be refused as a whole.
func tryCounters(ctx context.Context, opts *Options, family proxier.Family) error {
	if opts.Counters == nil {
		return errNoCounters
	}
	if err := ensureCounters(opts.Counters); err != nil {
		return err
	}
	if err := opts.Tools.Restore(ctx, family, xtables.Probe(countIn(invalidCounter), "filter")); err != nil {
		return fmt.Errorf("write a rule that counts (module xt_nfacct): %w", err)
	}
	return nil
}

// Counted are the packets that rules have counted; ok is false where none can.
func (t *Tier) Counted() (c Counted, ok bool, err error) {
	if t.uncounted[proxier.IPv4] != nil && t.uncounted[proxier.IPv6] != nil {
		return Counted{}, false, nil
	}
	err = t.netns.Do(func() (err error) {
		if c.InvalidDropped, err = t.opts.Counters.Packets(invalidCounter); err != nil {
			return err
		}
		c.LoopbackNodePorts, err = t.opts.Counters.Packets(loopbackCounter)
		return err
	})
	return c, err == nil, err
}

// The nft variant lets go of what rules named a moment after they are gone.
const (
	letGoInterval = 10 * time.Millisecond
	letGoPatience = time.Second
)

// RemoveCounters deletes those that no rule names any more, upstream's as well, as they are the
// same. It is for when the rules are gone; what others' rules name stays.
func RemoveCounters(ctx context.Context, c Counters) error {
	for _, name := range counterNames {
		var err error
		_ = wait.PollUntilContextTimeout(ctx, letGoInterval, letGoPatience, true, func(context.Context) (bool, error) {
			err = c.Delete(name)
			return !errors.Is(err, nfacct.ErrInUse), nil
		})
		switch {
		case errors.Is(err, nfacct.ErrInUse):
			klog.FromContext(ctx).Info("Left a counter that rules of somebody else name", "counter", name)
		case errors.Is(err, nfacct.ErrNotSupported): // then there is none
		case err != nil:
			return err
		}
	}
	return nil
}
