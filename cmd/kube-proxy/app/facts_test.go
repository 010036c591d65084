// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/sources/nodefacts"
)

// podCIDRs that were asked for and do not come are a problem, once it is time.
func TestAwaitPodCIDRs(t *testing.T) {
	for _, test := range []struct {
		name, mode string
		cidrs      []string // of a Node that comes while it waits
		waits      bool
		want       int
	}{
		{name: "none", mode: "NodeCIDR", waits: true, want: 1},
		{name: "in time", mode: "NodeCIDR", waits: true, cidrs: []string{"10.244.1.0/24"}},
		{name: "not needed", mode: "ClusterCIDR"},
	} {
		t.Run(test.name, func(t *testing.T) {
			o, err := complete(t, "", "--detect-local-mode="+test.mode)
			if err != nil {
				t.Fatal(err)
			}
			f := &facts{uplinks: devices.New(devices.Options{}), origins: devices.New(devices.Options{})}
			if f.settings, err = nodefacts.New(o.Config, o.gate); err != nil {
				t.Fatal(err)
			}
			f.start(t.Context())
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			clock, done, problems := clocktesting.NewFakeClock(time.Now()), make(chan struct{}), 0
			go func() {
				defer close(done)
				f.awaitPodCIDRs(ctx, clock, proxier.ReporterFunc(func(p proxier.Problem) {
					problems++
					if p.Kind != "Node" || p.Reason != proxier.ReasonIncompleteNode || p.Field != "spec.podCIDRs" {
						t.Errorf("reported %+v", p)
					}
				}))
			}()
			if test.waits {
				for !clock.HasWaiters() && ctx.Err() == nil {
					time.Sleep(time.Millisecond)
				}
				known := f.known
				f.fromNode(&v1.Node{Spec: v1.NodeSpec{PodCIDRs: test.cidrs}}, &known)
				clock.Step(podCIDRLimit)
			}
			<-done
			if problems != test.want || ctx.Err() != nil {
				t.Errorf("%d problems, want %d; %v", problems, test.want, ctx.Err())
			}
		})
	}
}
