// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
)

var smallViewSizes = lbmap.Sizes{Frontends: 40, Services: 24, Backends: 48, Slots: 64, Ranges: 10, Locals: 16}

// viewHarness is a proxier with tables in ordinary memory.
type viewHarness struct {
	*proxier.Proxier
	tables *lbmap.Tables
}

type viewTier struct{ writer *writer.Writer }

func (v viewTier) Sync(_ context.Context, u proxier.Update) error {
	_, err := v.writer.Sync(u)
	return err
}

func (v viewTier) Cleanup(context.Context) error { return nil }

func (v viewTier) Supports(*proxier.Decision, *proxier.Frontend) error { return nil }

func newViewHarness(t testing.TB, s lbmap.Sizes) *viewHarness {
	t.Helper()
	h := &viewHarness{tables: lbmap.NewFakeTables(s)}
	w := writer.New(h.tables, writer.Options{Sizes: s, Clock: clock.RealClock{}, Wait: func() {}, Report: func(proxier.Problem) {}})
	w.Format(7)
	p, err := proxier.New(proxier.Options{NodeName: "node1", Tier: viewTier{w}, Runner: proxier.DefaultRunnerOptions()})
	if err != nil {
		t.Fatal(err)
	}
	h.Proxier = p
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	return h
}

func (h *viewHarness) sync(t testing.TB) {
	t.Helper()
	if err := h.Sync(context.Background()); err != nil {
		t.Fatalf("sync: %v", err)
	}
}

// textOfView formats a view for comparisons, without ids.
func textOfView(v *ServiceView) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s/%s%s/%s %s", v.Namespace, v.Name, strings.TrimSuffix(":"+v.Port, ":"), v.Protocol, v.State)
	if v.Reason != "" {
		fmt.Fprintf(&b, ": %s", v.Reason)
	}
	if v.AffinitySeconds > 0 {
		fmt.Fprintf(&b, " affinity=%d", v.AffinitySeconds)
	}
	if v.Changing {
		b.WriteString(" changing")
	}
	b.WriteByte('\n')
	for _, f := range v.Frontends {
		fmt.Fprintf(&b, "  frontend %s %s %s %s\n", f.Address, f.Kind, f.Clients, f.Set)
	}
	for _, s := range v.Sets {
		fmt.Fprintf(&b, "  set %s %d %s\n", s.Name, s.Size, s.Verdict)
	}
	for _, e := range v.Backends {
		fmt.Fprintf(&b, "  backend %s %v local=%v terminating=%v\n", e.Address, e.Sets, e.Local, e.Terminating)
	}
	return b.String()
}

func textOfViews(views []ServiceView) string {
	var b strings.Builder
	for i := range views {
		b.WriteString(textOfView(&views[i]))
	}
	return b.String()
}

func mustView(t testing.TB, tables *lbmap.Tables) []ServiceView {
	t.Helper()
	views, err := tableReader{tables}.view()
	if err != nil {
		t.Fatal(err)
	}
	return views
}

// TestViewOfCounters: each outcome of a connection has its counter.
func TestViewOfCounters(t *testing.T) {
	h := newViewHarness(t, smallViewSizes)
	h.OnServiceAdd(writertest.Service("a", "10.96.0.1"))
	h.sync(t)
	h.tables.ServiceStats[mustView(t, h.tables)[0].ID] = lbmap.ServiceStats{Connections: 1, Rejected: 2, Dropped: 3, Raced: 4, Refused: 5, Unanswered: 6}
	if d := cmp.Diff(CountersView{Connections: 1, Rejected: 2, Dropped: 3, Raced: 4, Refused: 5, Unanswered: 6}, mustView(t, h.tables)[0].Counters); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestViewOfTables(t *testing.T) {
	// The backends below fit, but no more.
	sizes := lbmap.Sizes{Frontends: 16, Services: 16, Backends: 6, Slots: 16}
	h := newViewHarness(t, sizes)
	h.OnServiceAdd(writertest.Service("a", "10.96.0.1", func(s *v1.Service) {
		s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, "fd00:10:96::1")
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](600)}}
	}))
	mixed := writertest.Slice("a-1", "a", "10.244.0.2", "10.244.0.1")
	mixed.Endpoints[0].NodeName = ptr.To("node1")
	h.OnEndpointSliceAdd(mixed)
	// A terminating UDP backend keeps its clients.
	h.OnServiceAdd(writertest.Service("dns", "10.96.0.2", func(s *v1.Service) { s.Spec.Ports[0].Protocol = v1.ProtocolUDP }))
	ending := writertest.Slice("dns-1", "dns", "10.244.1.1", "10.244.1.2")
	ending.Ports[0].Protocol = ptr.To(v1.ProtocolUDP)
	ending.Endpoints[0].Conditions.Ready = ptr.To(false)
	ending.Endpoints[0].Conditions.Serving = ptr.To(true)
	ending.Endpoints[0].Conditions.Terminating = ptr.To(true)
	h.OnEndpointSliceAdd(ending)
	// The policy allows local backends only, and there is none.
	h.OnServiceAdd(writertest.Service("local", "10.96.0.3", func(s *v1.Service) {
		s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal)
	}))
	h.OnEndpointSliceAdd(writertest.Slice("local-1", "local", "10.244.1.1"))
	h.OnServiceAdd(writertest.Service("none", "10.96.0.4"))
	h.sync(t)
	// A Service that does not fit.
	h.OnServiceAdd(writertest.Service("vast", "10.96.0.5", func(s *v1.Service) { s.Spec.Ports[0].Name = "" }))
	vast := writertest.Slice("vast-1", "vast", "10.244.2.1", "10.244.2.2")
	vast.Ports[0].Name = ptr.To("")
	h.OnEndpointSliceAdd(vast)
	h.sync(t)

	want := `ns/a:p/TCP programmed affinity=600
  frontend 10.96.0.1:80 ClusterIP all ipv4/cluster
  frontend [fd00:10:96::1]:80 ClusterIP all ipv6/cluster
  set ipv4/cluster 2 
  set ipv6/cluster 0 reject
  backend 10.244.0.1:8080 [ipv4/cluster] local=false terminating=false
  backend 10.244.0.2:8080 [ipv4/cluster] local=true terminating=false
ns/dns:p/UDP programmed
  frontend 10.96.0.2:80 ClusterIP all ipv4/cluster
  set ipv4/cluster 1 
  backend 10.244.1.1:8080 [] local=false terminating=true
  backend 10.244.1.2:8080 [ipv4/cluster] local=false terminating=false
ns/local:p/TCP programmed
  frontend 10.96.0.3:80 ClusterIP all ipv4/local
  set ipv4/local 0 drop
ns/none:p/TCP programmed
  frontend 10.96.0.4:80 ClusterIP all ipv4/cluster
  set ipv4/cluster 0 reject
ns/vast/TCP not programmed: backends full
`
	if d := cmp.Diff(want, textOfViews(mustView(t, h.tables))); d != "" {
		t.Errorf("view (-want +got):\n%s", d)
	}
}

// TestViewShowsNoStranger: a backend of another generation or Service than the slot's is not shown,
// and the view is marked as incomplete.
func TestViewShowsNoStranger(t *testing.T) {
	h := newViewHarness(t, smallViewSizes)
	h.OnServiceAdd(writertest.Service("a", "10.96.0.1"))
	h.OnEndpointSliceAdd(writertest.Slice("a-1", "a", "10.244.0.1", "10.244.0.2", "10.244.0.3"))
	h.sync(t)
	tables := h.tables
	for id := range tables.Backends {
		switch lbmap.ToAddr(tables.Backends[id].Addr) {
		case netip.MustParseAddr("10.244.0.1"):
			tables.Backends[id].Generation++
		case netip.MustParseAddr("10.244.0.2"):
			tables.Backends[id].Service = 20
		}
	}
	views := mustView(t, tables)
	if len(views) != 1 || !views[0].Changing || len(views[0].Backends) != 1 || views[0].Backends[0].Address.String() != "10.244.0.3:8080" {
		t.Errorf("got %s", textOfViews(views))
	}

	// Inconsistent values do not cause reads outside of the tables.
	tables.Sets[views[0].ID*lbmap.SetsPerService] = lbmap.SetWord(uint32(len(tables.Slots))-1, 5)
	tables.Services[views[0].ID].NameLen = 255
	if views = mustView(t, tables); !views[0].Changing || len(views[0].Backends) != 0 {
		t.Errorf("got %s", textOfViews(views))
	}
}

func TestViewOfNothing(t *testing.T) {
	views := mustView(t, lbmap.NewFakeTables(smallViewSizes))
	if text, err := json.Marshal(views); err != nil || string(text) != "[]" {
		t.Errorf("got %s, %v", text, err)
	}
	h := newViewHarness(t, smallViewSizes)
	h.OnServiceAdd(writertest.Service("a", "10.96.0.1"))
	h.sync(t)
	text, err := json.Marshal(mustView(t, h.tables))
	// Lists are empty, not null.
	if err != nil || strings.Contains(strings.Replace(string(text), `"signals":null`, "", 1), "null") {
		t.Errorf("got %s, %v", text, err)
	}
}
