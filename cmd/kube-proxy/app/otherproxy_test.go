// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/sources/otherproxy"
)

// neighbour is another kube-proxy that a test starts and ends.
type neighbour struct {
	atomic.Pointer[otherproxy.Proxy]
	silent  atomic.Bool // it has its sockets, and does not answer
	events  []string
	present []bool
	ends    int
}

func (n *neighbour) follower(shared bool, delay time.Duration) *otherProxy {
	return &otherProxy{
		find: func(context.Context) (*otherproxy.Proxy, error) {
			if n.silent.Load() {
				return nil, otherproxy.ErrSilent
			}
			return n.Load(), nil
		},
		shared: shared, delay: delay, clock: clock.RealClock{},
		seen:   func(p *otherproxy.Proxy) { n.present = append(n.present, p != nil) },
		record: func(eventType, reason, _ string) { n.events = append(n.events, eventType+" "+reason) },
		ended:  func() { n.ends++ },
	}
}

// A process waits for another kube-proxy to end, for a while.
func TestAwaitOtherProxy(t *testing.T) {
	for _, test := range []struct {
		name   string
		mode   string // empty for no other one
		shared bool
		delay  time.Duration // 10s if 0
		ends   time.Duration // 0 for never
		silent time.Duration // it does not answer for so long
		want   time.Duration
		waits  int
	}{
		{name: "none", want: 0},
		{name: "it ends", mode: "iptables", ends: 1500 * time.Millisecond, want: 2 * time.Second, waits: 1},
		{name: "it stays", mode: "nftables", want: 10 * time.Second, waits: 1},
		{name: "it is to stay", mode: "iptables", shared: true, want: 0},
		{name: "it answers late", mode: "iptables", silent: 1500 * time.Millisecond, ends: 5500 * time.Millisecond, want: 6 * time.Second, waits: 1},
		{name: "something that never answers", mode: "iptables", silent: time.Hour, want: 2 * time.Second},
		{name: "something that never answers, and a short delay", mode: "iptables", silent: time.Hour, delay: 500 * time.Millisecond, want: 500 * time.Millisecond},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var n neighbour
				if test.mode != "" {
					n.Store(&otherproxy.Proxy{Mode: test.mode})
				}
				if test.silent > 0 {
					n.silent.Store(true)
					time.AfterFunc(test.silent, func() { n.silent.Store(false) })
				}
				if test.ends > 0 {
					time.AfterFunc(test.ends, func() { n.Store(nil) })
				}
				waits, start := 0, time.Now()
				if err := n.follower(test.shared, cmp.Or(test.delay, 10*time.Second)).await(t.Context(), func() { waits++ }); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(start); took != test.want || waits != test.waits {
					t.Errorf("it took %v, with %d waits; want %v and %d", took, waits, test.want, test.waits)
				}
				if len(n.events) != test.waits {
					t.Errorf("events %q", n.events)
				}
			})
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	var n neighbour
	n.Store(&otherproxy.Proxy{Mode: "iptables"})
	if err := n.follower(false, time.Hour).await(ctx, cancel); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of the context: %v", err)
	}
}

// Another kube-proxy that appears or disappears is reported, but not one that misses a look.
func TestFollowOtherProxy(t *testing.T) {
	const looks = otherInterval
	for shared, want := range map[bool][]string{
		true:  {"Normal OtherProxyRuns", "Warning OtherProxyMissing", "Normal OtherProxyRuns", "Warning OtherProxyMissing"},
		false: {"Warning OtherProxyRuns"},
	} {
		synctest.Test(t, func(t *testing.T) {
			var n neighbour
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { n.follower(shared, time.Second).follow(ctx); close(done) }()
			if !shared {
				time.Sleep(looks + looks/2)
			} else {
				// It starts a moment after this process, and is missed later.
				time.Sleep(looks / 2)
				n.Store(&otherproxy.Proxy{Mode: "iptables"})
				time.Sleep(looks)
				n.Store(nil)
				time.Sleep((otherMisses + 1) * looks)
			}
			n.Store(&otherproxy.Proxy{Mode: "iptables"})
			time.Sleep(2 * looks)
			n.Store(nil) // for one look
			time.Sleep(looks)
			n.Store(&otherproxy.Proxy{Mode: "iptables"})
			time.Sleep(2 * looks)
			n.Store(nil)
			time.Sleep(2 * otherMisses * looks)
			cancel()
			<-done
			if !slices.Equal(n.events, want) {
				t.Errorf("shared %v: events %q, want %q", shared, n.events, want)
			}
			if wantEnds := map[bool]int{false: 1}[shared]; n.ends != wantEnds {
				t.Errorf("shared %v: what it left was removed %d times, want %d", shared, n.ends, wantEnds)
			}
			if n.present[0] || !slices.Contains(n.present, true) || n.present[len(n.present)-1] {
				t.Errorf("the metric was %v", n.present)
			}
		})
	}
}

// Another kube-proxy that is stopped has not ended, however long it is: what it has in the kernel stays until its sockets are gone. Beside
// one that is to stay, it counts as missing.
func TestFollowSilentProxy(t *testing.T) {
	for shared, want := range map[bool][]string{
		true:  {"Normal OtherProxyRuns", "Warning OtherProxyMissing"},
		false: {"Warning OtherProxyRuns"},
	} {
		synctest.Test(t, func(t *testing.T) {
			var n neighbour
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { n.follower(shared, time.Second).follow(ctx); close(done) }()
			during := func(looks time.Duration) {
				time.Sleep(looks * otherInterval)
				synctest.Wait()
			}
			during(1)
			n.Store(&otherproxy.Proxy{Mode: "nftables"})
			during(1)
			n.silent.Store(true)
			during(3 * otherMisses)
			// Its sockets are missed for fewer looks than an end takes, before and after it is stopped again.
			n.Store(nil)
			for range otherMisses {
				n.silent.Store(false)
				during(otherMisses - 1)
				n.silent.Store(true)
				during(1)
			}
			if n.ends != 0 {
				t.Errorf("shared %v: what it left was removed while it was stopped", shared)
			}
			if !slices.Equal(n.events, want) {
				t.Errorf("shared %v: events %q, want %q", shared, n.events, want)
			}
			n.silent.Store(false)
			during(otherMisses)
			if wantEnds := map[bool]int{false: 1}[shared]; n.ends != wantEnds {
				t.Errorf("shared %v: after its end, what it left was removed %d times, want %d", shared, n.ends, wantEnds)
			}
			cancel()
			<-done
		})
	}
}
