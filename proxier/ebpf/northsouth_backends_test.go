// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestBackendsComeAndGo: what happens to established and new connections while endpoints
// terminate and are removed one by one, and when the Service is deleted.
func TestBackendsComeAndGo(t *testing.T) {
	e := newEdge(t, Options{})
	pods := map[string]*lab.Pod{"here": serve(t, e.here), "there": serve(t, e.there)}
	e.use(t, e.here, e.there)
	// At least one connection through each entry to each pod.
	var list []*visit
	for _, n := range e.entries() {
		for missing := map[string]bool{"here": true, "there": true}; len(missing) > 0; {
			v := e.visit(t, n)
			if missing[v.server] {
				delete(missing, v.server)
				list = append(list, v)
			}
		}
	}
	for _, v := range list {
		v.want(t, v.server)
	}

	// Terminating endpoints keep their established connections.
	e.terminate(t, e.here, e.there)
	for _, v := range list {
		v.want(t, v.server)
		e.visit(t, v.entry).want(t, "there")
	}
	// TCP connections stay even with a removed backend. UDP changes the backend with the next
	// packet.
	for _, left := range []string{"here", "there"} {
		e.use(t, pods[left])
		for _, v := range list {
			if v.entry.network == "tcp" {
				v.want(t, v.server)
			} else {
				v.want(t, left)
			}
			e.visit(t, v.entry).want(t, left)
		}
	}

	e.use(t)
	for _, v := range list {
		if v.entry.network == "tcp" {
			v.want(t, v.server)
		} else if r, err := lab.AskConn(t.Context(), v.conn); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s without backends: %v %v", v.entry, r, err)
		}
		if r, err := e.client.Ask(t.Context(), v.entry.network, v.entry.to); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("new connection %s without backends: %v %v", v.entry, r, err)
		}
	}
	e.use(t, e.here)
	for _, v := range list {
		if v.entry.network == "udp" {
			v.want(t, "here")
		}
	}
	e.OnServiceDelete(edgeService(nil))
	e.sync(t)
	// Only established TCP connections remain.
	for _, v := range list {
		if v.entry.network == "tcp" {
			v.want(t, v.server)
		} else if r, err := lab.AskConn(shortly(t), v.conn); err == nil {
			t.Errorf("%s without the Service: %v", v.entry, r)
		}
		if r, err := e.client.Ask(shortly(t), v.entry.network, v.entry.to); err == nil {
			t.Errorf("new connection %s without the Service: %v", v.entry, r)
		}
	}
}

// terminate makes the pods endpoints, the first one terminating.
func (e *edge) terminate(t testing.TB, leaving *lab.Pod, staying ...*lab.Pod) {
	t.Helper()
	for _, s := range slicesOf("web", append([]*lab.Pod{leaving}, staying...)...) {
		c := &s.Endpoints[0].Conditions
		c.Ready, c.Serving, c.Terminating = ptr.To(false), ptr.To(true), ptr.To(true)
		e.OnEndpointSliceUpdate(nil, s)
	}
	e.sync(t)
}

// visit is a connection, or a UDP socket.
type visit struct {
	entry  entry
	conn   net.Conn
	server string         // the server that sent the first reply
	peer   netip.AddrPort // the client, as the server sees it
}

func (e *edge) visit(t testing.TB, n entry) *visit {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	v, err := e.tryVisit(ctx, t, n)
	if err != nil {
		t.Fatalf("%s: %v", n, err)
	}
	return v
}

// tryVisit is visit where it may fail.
func (e *edge) tryVisit(ctx context.Context, t testing.TB, n entry) (*visit, error) {
	c, err := e.client.Dial(ctx, n.network, n.to)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { c.Close() })
	r, err := lab.AskConn(ctx, c)
	return &visit{n, c, r.Server, r.Peer}, err
}

// want sends a request, and expects a reply from this server.
func (v *visit) want(t testing.TB, server string) {
	t.Helper()
	r, err := lab.AskConn(t.Context(), v.conn)
	if err != nil || r.Server != server {
		t.Errorf("%s: reply from %q, %v; want %s", v.entry, r.Server, err, server)
	}
}

// TestResetRemoved: if configured, clients of a removed backend get a reset for their next packet.
// Other clients do not.
func TestResetRemoved(t *testing.T) {
	e := newEdge(t, Options{ResetRemoved: true})
	e.use(t, serve(t, e.here), serve(t, e.there))
	list := e.visitBoth(t)
	counts := counted{tier: e.tier}
	counts.since(t)
	// Backends that are terminating, or not ready, are not removed.
	for _, c := range []discoveryv1.EndpointConditions{
		{Ready: ptr.To(false), Serving: ptr.To(true), Terminating: ptr.To(true)}, {Ready: ptr.To(false), Serving: ptr.To(false)},
	} {
		for _, s := range slicesOf("web", e.here, e.there) {
			s.Endpoints[0].Conditions = c
			e.OnEndpointSliceUpdate(nil, s)
		}
		e.sync(t)
		for _, v := range list {
			v.want(t, v.server)
		}
	}
	for _, left := range [][]*lab.Pod{{e.there}, {}} {
		e.use(t, left...)
		var open []*visit
		for _, v := range list {
			if slices.ContainsFunc(left, func(p *lab.Pod) bool { return p.Name == v.server }) {
				v.want(t, v.server)
				open = append(open, v)
				continue
			}
			v.wantReset(t)
		}
		gone := len(list) - len(open)
		if n := counts.since(t)["rejected_no_backend"]; gone == 0 || n < uint64(gone) {
			t.Errorf("%d of %d connections were reset, and %d packets counted as rejected", gone, len(list), n)
		}
		list = open
	}
	// The flows of reset connections are freed.
	if n := e.tier.flowTable.Count(lbmap.FlowKeptTCP); n != 0 {
		t.Errorf("%d flows are kept", n)
	}
	// Their clients can connect again.
	e.use(t, e.here)
	for _, n := range e.entries("tcp") {
		e.visit(t, n).want(t, "here")
	}
}

// wantReset sends a request, and expects a reset.
func (v *visit) wantReset(t testing.TB) {
	t.Helper()
	if r, err := lab.AskConn(t.Context(), v.conn); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("%s to %s, which was removed: %v %v", v.entry, v.server, r, err)
	}
}

// visitBoth opens at least one TCP connection through each entry, and to each pod.
func (e *edge) visitBoth(t testing.TB) (list []*visit) {
	t.Helper()
	for missing := map[string]bool{"here": true, "there": true}; len(missing) > 0; {
		for _, n := range e.entries("tcp") {
			v := e.visit(t, n)
			delete(missing, v.server)
			list = append(list, v)
		}
	}
	return list
}

// TestNewTables: flows go on when tables are built anew, in their maps or in others, and have the ids of their backends then: with
// ResetRemoved, clients of backends that are removed later are reset. Of those that were removed before, new tables know nothing.
func TestNewTables(t *testing.T) {
	sizes := drainSizes
	e := newEdge(t, Options{Sizes: sizes, ResetRemoved: true})
	// The clock was an hour ahead, and is set back afterwards.
	e.tier.writer.Format(uint32(time.Now().Add(time.Hour).Unix()))
	pods := []*lab.Pod{serve(t, e.here), serve(t, e.there)}
	e.use(t, pods...)
	tcp := e.visitBoth(t)
	var udp []*visit
	for _, n := range e.entries("udp") {
		udp = append(udp, e.visit(t, n))
	}
	rebuild := func(tcpFlows uint32, pods ...*lab.Pod) {
		t.Helper()
		e.close()
		sizes.Backends *= 2
		sizes.TCPFlows = tcpFlows
		e.begin(t, Options{Sizes: sizes, ResetRemoved: true}, nil)
		if e.tier.Adopted() {
			t.Fatal("the maps were adopted")
		}
		e.use(t, pods...)
	}
	for i, tcpFlows := range []uint32{sizes.TCPFlows, 2 * sizes.TCPFlows} { // those of other sizes are copied
		rebuild(tcpFlows, pods...)
		for _, v := range slices.Concat(tcp, udp) {
			v.want(t, v.server)
		}
		asked := uint64(2 + i)
		flows := flowsOf(t, e.at)
		for _, v := range udp {
			client := v.conn.LocalAddr().(*net.UDPAddr).AddrPort()
			if f := flows[[2]netip.AddrPort{client, v.entry.to}]; f.Requests == nil || f.Requests.Packets != asked || f.Name != "web" {
				t.Errorf("%s: after %d requests, the flow is %+v", v.entry, asked, f)
			}
		}
	}
	// The backend on the other node goes while no process serves.
	rebuild(sizes.TCPFlows, e.here)
	for _, v := range tcp {
		v.want(t, v.server)
	}
	for _, v := range udp {
		v.want(t, "here")
	}
	e.use(t)
	for _, v := range tcp {
		if v.server == "here" {
			v.wantReset(t)
		} else {
			v.want(t, v.server)
		}
	}
}
