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

// Counters are packet counters of the kernel, by name; nfacct.Kernel has them.
type Counters interface {
	// Ensure creates one unless it exists.
	Ensure(name string) error
	Packets(name string) (uint64, error)
	// Delete deletes one, if it exists; nfacct.ErrInUse says that rules name it.
	Delete(name string) error
}

// Upstream's counters, so that a take-over in either direction continues their values.
const (
	invalidCounter  = "ct_state_invalid_dropped_pkts"
	loopbackCounter = "localhost_nps_accepted_pkts"
)

var counterNames = []string{invalidCounter, loopbackCounter}

// countIn is the match that counts packets.
func countIn(name string) string {
	return "-m nfacct --nfacct-name  " + name // iptables-save prints both spaces
}

// Counted are numbers of packets.
type Counted struct {
	// InvalidDropped were dropped because conntrack found them invalid.
	InvalidDropped uint64
	// LoopbackNodePorts opened connections to NodePorts at loopback addresses.
	LoopbackNodePorts uint64
}

var errNoCounters = errors.New("packet counters are not configured")

// ensureCounters creates the missing ones.
func ensureCounters(c Counters) error {
	for _, name := range counterNames {
		if err := c.Ensure(name); err != nil {
			return err
		}
	}
	return nil
}

// tryCounters returns why rules of a family cannot count: the kernel lacks the counters, or
// the match that names them. A text with an unknown match would be refused as a whole.
func tryCounters(ctx context.Context, opts *Options, family proxier.Family) error {
	if opts.Counters == nil {
		return errNoCounters
	}
	if err := ensureCounters(opts.Counters); err != nil {
		return err
	}
	if err := opts.Tools.Restore(ctx, family, xtables.Probe(countIn(invalidCounter), "filter")); err != nil {
		return fmt.Errorf("write a rule that counts packets (module xt_nfacct): %w", err)
	}
	return nil
}

// Counted returns the packets that rules have counted; ok is false where none can.
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

// The nft variant releases counters a moment after the rules that name them are deleted.
const (
	releaseInterval = 10 * time.Millisecond
	releaseTimeout  = time.Second
)

// RemoveCounters deletes the counters after the rules are deleted. They are upstream's, too. A
// counter that a foreign rule names stays.
func RemoveCounters(ctx context.Context, c Counters) error {
	for _, name := range counterNames {
		var err error
		_ = wait.PollUntilContextTimeout(ctx, releaseInterval, releaseTimeout, true, func(context.Context) (bool, error) {
			err = c.Delete(name)
			return !errors.Is(err, nfacct.ErrInUse), nil
		})
		switch {
		case errors.Is(err, nfacct.ErrInUse):
			klog.FromContext(ctx).Info("Cannot delete counter: a foreign rule still references it", "counter", name)
		case errors.Is(err, nfacct.ErrNotSupported): // so that none exists
		case err != nil:
			return err
		}
	}
	return nil
}
