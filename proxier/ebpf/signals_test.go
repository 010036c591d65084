// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/inspect"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestSignals: connections of sockets are counted by what came of them, with bytes and times. A process that does not watch them takes
// the program off, and the id of a Service that is gone comes without its signals.
func TestSignals(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	web, mute, client := serve(t, one.Pod("web")), one.Pod("mute"), one.Pod("client")
	n := newNode(t, one, l, Options{Signals: true})
	closed, silent := netip.MustParseAddr("10.96.0.70"), netip.MustParseAddr("10.96.0.71")
	feed := func() {
		n.OnServiceAdd(dualService())
		n.setPods(web)
		n.OnServiceAdd(writertest.Service("closed", closed.String()))
		n.OnEndpointSliceAdd(writertest.Slice("closed", "closed", mute.Addr4.String())) // without a listener
		n.OnServiceAdd(writertest.Service("silent", silent.String()))
		n.OnEndpointSliceAdd(writertest.Slice("silent", "silent", "192.0.2.1")) // unreachable
		n.sync(t)
	}
	feed()
	const asked = 10
	for range asked {
		if _, err := client.Ask(shortly(t), "tcp", netip.AddrPortFrom(vip4, 80)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := client.Ask(shortly(t), "tcp", netip.AddrPortFrom(closed, 80)); err == nil {
		t.Fatal("a pod without a listener accepted a connection")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	if _, err := client.Ask(ctx, "tcp", netip.AddrPortFrom(silent, 80)); err == nil {
		t.Fatal("an unreachable endpoint accepted a connection")
	}
	cancel()
	// Connections end soon after the client closed them.
	var got map[string]lbmap.ServiceSignals
	for deadline := time.Now().Add(10 * time.Second); ; lull(t.Context()) {
		got = signals(t, n.tier)
		if sum(got["web"].Rtt.Buckets) == asked || time.Now().After(deadline) {
			break
		}
	}
	s := got["web"]
	if s.Established != asked || s.Refused != 0 || s.Unanswered != 0 || sum(s.Connect.Buckets) != asked || sum(s.Rtt.Buckets) != asked || s.Sent == 0 || s.Received == 0 {
		t.Errorf("Service with an endpoint: %+v", s)
	}
	if s.Connect.SumUs == 0 || s.Connect.SumUs > asked*1e6 || s.Rtt.SumUs > asked*1e6 {
		t.Errorf("times of %d connections: %d and %d microseconds", asked, s.Connect.SumUs, s.Rtt.SumUs)
	}
	if s := got["closed"]; s.Refused != 1 || s.Established+s.Unanswered != 0 {
		t.Errorf("Service whose endpoint refuses: %+v", s)
	}
	if s := got["silent"]; s.Unanswered != 1 || s.Established+s.Refused != 0 {
		t.Errorf("Service whose endpoint does not answer: %+v", s)
	}

	views := servicesOf(t, inspectNode(t, one))
	at := slices.IndexFunc(views, func(v inspect.ServiceView) bool { return v.Name == "web" && v.Protocol == "TCP" })
	if at < 0 || views[at].Signals == nil || views[at].Signals.Established != asked || views[at].Signals.Connect.Count != asked || views[at].Signals.RTT.MedianSeconds == nil {
		t.Errorf("inspected: %+v", views)
	}

	// A restart keeps them, and another Service does not inherit them.
	n.close()
	n.start(t, Options{Signals: true})
	feed()
	if again := signals(t, n.tier)["web"]; again.Established != asked {
		t.Errorf("after a restart: %+v", again)
	}
	n.OnServiceDelete(dualService())
	n.sync(t)
	for id := range uint32(16) {
		if s, err := n.tier.signals.Of(id); err != nil || s.Established != 0 {
			t.Errorf("service %d, after the one was deleted: %+v, %v", id, s, err)
		}
	}

	n.close()
	n.start(t, Options{})
	feed()
	found, err := datapath.FindAttached(n.tier.cgroup)
	if err != nil {
		t.Fatal(err)
	}
	defer datapath.CloseAttached(found)
	for _, a := range found {
		if a.Hook == datapath.Hooks[datapath.SignalHook].Attach {
			t.Error("the program is still attached")
		}
	}
	// A later process with signals must not find old ones.
	if left, err := lbmap.CountEntries[uint32, lbmap.ServiceSignals](n.tier.maps["tdm_signals"]); err != nil || left != 0 {
		t.Errorf("%d service ports have signals, %v", left, err)
	}
}

func signals(t *testing.T, tier *Tier) map[string]lbmap.ServiceSignals {
	t.Helper()
	list, err := tier.Traffic()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]lbmap.ServiceSignals{}
	for _, s := range list {
		if s.Protocol == "TCP" {
			all[s.Name] = s.Signals
		}
	}
	return all
}

func sum(buckets [lbmap.SignalBuckets]uint64) (n uint64) {
	for _, b := range buckets {
		n += b
	}
	return n
}
