// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/tandem-proxy/tandem/test/lab"
)

// TestBindsAreTold: a process of the host that binds a port of a Service is told of, after a restart as well. Other ports, other
// protocols and pods are not.
func TestBindsAreTold(t *testing.T) {
	e := newEdge(t, Options{})
	e.use(t, e.here)
	for range 2 {
		ctx, stop := context.WithCancel(t.Context())
		var told atomic.Int64
		ended := make(chan error, 1)
		go func() { ended <- e.tier.FollowBinds(ctx, func() { told.Add(1) }) }()
		want := int64(0)
		for _, test := range []struct {
			at      *lab.Sandbox
			network string
			port    uint16
			told    bool
		}{
			{e.at.Sandbox, "tcp", 4711, false},
			{e.at.Sandbox, "udp", 4711, false},
			{e.here.Sandbox, "tcp", lbPort, false},
			{e.at.Sandbox, "tcp", lbPort, true},
			{e.at.Sandbox, "udp", lbPort, true},
		} {
			for _, a := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified(), e.at.Addr4, e.at.Addr6} {
				if test.at == e.here.Sandbox && !a.IsUnspecified() {
					continue
				}
				if err := test.at.Do(func() error {
					socket, err := listenAt(test.network, netip.AddrPortFrom(a, test.port))
					if err == nil {
						err = socket.Close()
					}
					return err
				}); err != nil {
					t.Fatal(err)
				}
				if test.told {
					want++
				}
			}
		}
		lab.Await(t, patience, "to be told of sockets", func() error {
			if n := told.Load(); n != want {
				return fmt.Errorf("told of %d, want %d", n, want)
			}
			return nil
		})
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if err := e.tier.Close(); err != nil {
			t.Fatal(err)
		}
		e.begin(t, Options{}, nil)
		if !e.tier.Adopted() {
			t.Error("maps were not adopted")
		}
	}
}
