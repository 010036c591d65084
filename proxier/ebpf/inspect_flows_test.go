// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"net"
	"net/netip"
	"testing"

	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/inspect"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// flowsOf are the flows of a node by client and frontend.
func flowsOf(t *testing.T, at *lab.Node) map[[2]netip.AddrPort]inspect.FlowView {
	t.Helper()
	all := map[[2]netip.AddrPort]inspect.FlowView{}
	i := inspectNode(t, at)
	err := at.Do(func() error {
		return i.Flows(t.Context(), "", "/proc", func(v inspect.FlowView) { all[[2]netip.AddrPort{v.Client, v.Frontend}] = v })
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestInspectFlows: flows of clients outside and of sockets are shown, in each state.
func TestInspectFlows(t *testing.T) {
	kernel.Since(t, 5, 12, "reading socket storage")
	e := newEdge(t, Options{}, lab.Options{Pause: true})
	for _, pod := range []*lab.Pod{serve(t, e.here), serve(t, e.there)} {
		e.use(t, pod)
		for _, n := range e.entries() {
			t.Run(pod.Name+" "+n.String(), func(t *testing.T) {
				v := e.visit(t, n)
				client := localOf(v.conn)
				backend := netip.AddrPortFrom(addrOf(pod.Sandbox, n.to.Addr()), targetPort)
				got := flowsOf(t, e.at)[[2]netip.AddrPort{client, n.to}]
				if got.Namespace+"/"+got.Name != "ns/web" || got.Protocol != protocolOf(n.network) || got.At != inspect.AtPackets || got.Backend != backend {
					t.Fatalf("client %s: %+v", client, got)
				}
				action, source := "deliver", client
				if pod == e.there {
					action = "forward"
				}
				if got.Source != nil {
					source = *got.Source
				}
				if got.Action != action || source != v.peer {
					t.Errorf("action %s, source %s; want %s, %s", got.Action, source, action, v.peer)
				}
				want := flowtable.Established
				if n.network == "udp" {
					want = flowtable.Answered
				}
				if got.AgeSeconds == nil || *got.AgeSeconds > 60 {
					t.Errorf("a new flow has no age, or another one: %+v", got)
				}
				if got.State != want.String() || got.Device != uplinksOf(t, e.at)[0].Name || *got.IdleSeconds > 5 || got.Requests.Packets == 0 || got.Replies.Packets == 0 || got.Replies.Bytes == 0 {
					t.Errorf("got %+v, requests %+v, replies %+v", got, got.Requests, got.Replies)
				}
				const older = 1000 // seconds
				e.backdate(t, v, older)
				v.want(t, pod.Name)
				if got := flowsOf(t, e.at)[[2]netip.AddrPort{client, n.to}]; *got.AgeSeconds < older || *got.AgeSeconds > older+60 || *got.IdleSeconds > 5 {
					t.Errorf("after another packet, %d s later: age %d s, idle for %d s", older, *got.AgeSeconds, *got.IdleSeconds)
				}
				if n.network == "udp" {
					return
				}
				if err := v.conn.(*net.TCPConn).CloseWrite(); err != nil {
					t.Fatal(err)
				}
				waitFor(t, "the end of the connection", func() bool {
					state := flowsOf(t, e.at)[[2]netip.AddrPort{client, n.to}].State
					return state == flowtable.Closing.String() || state == flowtable.Closed.String()
				})
			})
		}
	}
	for name, to := range targets() {
		network := name[:3]
		t.Run("socket "+name, func(t *testing.T) {
			c, err := e.here.Dial(t.Context(), network, to)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := lab.AskConn(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			got := flowsOf(t, e.at)[[2]netip.AddrPort{localOf(c), to}]
			if got.Name != "web" || got.Protocol != protocolOf(network) || got.At != inspect.AtSocket || got.Backend != netip.AddrPortFrom(addrOf(e.there.Sandbox, to.Addr()), targetPort) {
				t.Fatalf("got %+v", got)
			}
			state := "connected"
			if network == "tcp" {
				state = flowtable.Established.String()
			}
			counted := got.RTTMicroseconds != nil && *got.RTTMicroseconds > 0 && got.IdleSeconds != nil && got.Requests != nil && got.Replies.Bytes > 0
			if got.AgeSeconds == nil || *got.AgeSeconds > 60 {
				t.Errorf("a new connection has no age, or another one: %+v", got)
			}
			if got.State != state || counted != (network == "tcp") {
				t.Errorf("got %+v, requests %+v, replies %+v", got, got.Requests, got.Replies)
			}
		})
	}
}

// backdate has the flow of a connection have begun earlier.
func (e *edge) backdate(t *testing.T, v *visit, seconds uint32) {
	t.Helper()
	err := e.tier.flowTable.Each(func(_ int, list []lbmap.Flow) error {
		for i := range list {
			if f := &list[i]; lbmap.FlowStage(f.Life) >= lbmap.FlowYoung && lbmap.ToAddrPort(f.Request.Src, f.Request.Sport) == localOf(v.conn) {
				second := flowtable.MonotonicSeconds() - seconds
				f.Created = [3]uint8{uint8(second), uint8(second >> 8), uint8(second >> 16)}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func localOf(c net.Conn) netip.AddrPort {
	a := netip.MustParseAddrPort(c.LocalAddr().String())
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

func protocolOf(network string) string {
	if network == "tcp" {
		return "TCP"
	}
	return "UDP"
}
