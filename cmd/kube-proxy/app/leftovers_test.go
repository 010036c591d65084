// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	k8smetrics "k8s.io/component-base/metrics"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/observe/metrics"
	"github.com/tandem-proxy/tandem/proxier"
)

// counted is a leftover that counts its removals.
type counted struct{ retired, failures int }

func (*counted) what() string                  { return "something" }
func (*counted) cleanup(context.Context) error { return nil }
func (c *counted) retire(context.Context, *parts) error {
	c.retired++
	if c.failures > 0 {
		c.failures--
		return context.DeadlineExceeded
	}
	return nil
}

// stuck is a leftover whose connections do not end.
type stuck struct{ *counted }

func (stuck) what() string { return "something that drains" }
func (stuck) retire(ctx context.Context, _ *parts) error {
	<-ctx.Done()
	return ctx.Err()
}

// Leftovers are removed once this mode serves everything, again if that fails, and once more when another
// kube-proxy has ended.
func TestLeftovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &counted{failures: 1}
		h := &host{config: config.New()}
		l := leftoversOf(modeNamed(h, capabilities.ModeEBPF), h, &parts{}, func(string, time.Time) {})
		l.list = []leftover{c, stuck{}}
		go l.run(t.Context())
		removed := func(when string, want int) {
			t.Helper()
			time.Sleep(time.Minute)
			synctest.Wait()
			if c.retired != want {
				t.Errorf("%s: %d removals, want %d", when, c.retired, want)
			}
		}
		removed("before the first sync", 0)
		l.Synced(proxier.SyncInfo{Full: true, Err: context.Canceled})
		removed("after one that failed", 0)
		l.Synced(proxier.SyncInfo{Full: true})
		l.Synced(proxier.SyncInfo{Full: true})
		removed("after the first sync", 2)
		l.otherEnded()
		removed("after the end of another kube-proxy", 3)
	})
}

// lasting is a leftover that takes so long to remove.
type lasting struct {
	counted
	time.Duration
}

func (l *lasting) retire(ctx context.Context, p *parts) error {
	time.Sleep(l.Duration)
	return l.counted.retire(ctx, p)
}

// While the removal of a leftover lasts, and only if it does, a metric has the time at which it began, also over attempts that fail.
func TestDraining(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, registry := metrics.New(nil), k8smetrics.NewKubeRegistry()
		if err := m.Register(kubeRegistry{registry}, nil, nil, nil); err != nil {
			t.Fatal(err)
		}
		h := &host{config: config.New()}
		l := leftoversOf(modeNamed(h, capabilities.ModeEBPF), h, &parts{}, m.Draining)
		slow := &lasting{counted{failures: 1}, 25 * time.Second}
		l.list = []leftover{slow}
		go l.run(t.Context())
		began := time.Now()
		l.Synced(proxier.SyncInfo{Full: true})
		expect := func(after time.Duration, want ...float64) {
			t.Helper()
			time.Sleep(time.Until(began.Add(after)))
			synctest.Wait()
			families, err := registry.Gather()
			if err != nil {
				t.Fatal(err)
			}
			var got []float64
			for _, family := range families {
				if family.GetName() == "tandem_draining_since_timestamp_seconds" {
					for _, metric := range family.GetMetric() {
						got = append(got, metric.GetGauge().GetValue())
					}
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("after %s: %v, want %v", after, got, want)
			}
		}
		since := float64(began.Unix())
		expect(drainsAfter - 1)
		expect(drainsAfter, since)
		expect(45*time.Second, since) // the second attempt
		expect(time.Minute)
		if slow.retired != 2 {
			t.Errorf("%d removals", slow.retired)
		}

		slow.Duration, began = drainsAfter/2, time.Now()
		l.otherEnded()
		expect(drainsAfter)
	})
}
