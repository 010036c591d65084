// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/packet"
)

// wrapped is a frame whose IP packet is the payload of one between two addresses, as programs send it.
func (p *path) wrapped(frame []byte, from, to netip.Addr) []byte {
	protocol := uint8(unix.IPPROTO_IPIP)
	if from.Is6() {
		protocol = unix.IPPROTO_IPV6
	}
	q := packet.NewProtocol(from, to, protocol, frame[14:])
	if q.IPv4 != nil {
		q.IPv4.DontFragment = true
	}
	return p.frame(q)
}

// TestPacketDirect: what comes in an IP packet is taken out only for frontends, connections and probes, and goes nowhere else; a backend on
// another node gets packets in IP packets once its node takes them.
func TestPacketDirect(t *testing.T) {
	p := newPath(t, Options{})
	if err := p.resolve(); err != nil {
		t.Fatal(err)
	}
	policy := pathPolicy(p.at)
	policy.Forwarding = proxier.DSR
	p.UpdatePolicy(policy, func(*proxier.Facts) {})
	here, there := netip.MustParseAddrPort("10.96.0.10:80"), netip.MustParseAddrPort("10.96.0.11:80")
	remote := netip.MustParseAddr("10.244.2.7")
	expose := func(name string, vip netip.AddrPort, node string, backend netip.Addr) {
		p.OnServiceAdd(writertest.Service(name, vip.Addr().String()))
		s := writertest.Slice(name+"-4", name)
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{backend.String()}, NodeName: &node})
		p.OnEndpointSliceAdd(s)
	}
	expose("here", here, p.at.Name, p.pod.Addr4)
	expose("there", there, p.node2.Name, remote)
	if err := p.sync(); err != nil {
		t.Fatal(err)
	}
	client, nodeA := netip.MustParseAddrPort("198.51.100.9:4000"), p.node2.Addr4
	backend := netip.AddrPortFrom(p.pod.Addr4, 8080)
	bare := func(q packet.Packet) []byte { return p.frame(q) }
	syn := bare(tcp(client, here, packet.SYN))
	echo := func(from, to netip.Addr) []byte {
		q := packet.NewEcho(from, to, 7, 1, []byte("cookie"))
		return bare(q)
	}
	unreachable := bare(p.icmp(netip.AddrPortFrom(client.Addr(), 0), packet.PortUnreachable, 0, tcp(netip.MustParseAddrPort("192.0.2.1:5"), client, packet.ACK)))
	for _, c := range []struct {
		name    string
		frame   []byte
		verdict int32
		want    []byte // nil for any
		reason  string
	}{
		{"a request", p.wrapped(syn, nodeA, p.pod.Addr4), next, bare(tcp(client, backend, packet.SYN)), "FORWARD_LOCAL"},
		{"more of the connection", p.wrapped(bare(tcp(client, here, packet.ACK)), nodeA, p.pod.Addr4), next, bare(tcp(client, backend, packet.ACK)), "FORWARD_LOCAL"},
		{"for a backend that is not known", p.wrapped(bare(tcp(netip.MustParseAddrPort("198.51.100.9:4001"), here, packet.SYN)), nodeA, netip.MustParseAddr("10.244.1.99")), next, nil, "FORWARD_LOCAL"},
		{"to no frontend", p.wrapped(bare(tcp(client, netip.MustParseAddrPort("192.0.2.1:80"), packet.SYN)), nodeA, p.pod.Addr4), next, nil, ""},
		{"in two IP packets", p.wrapped(p.wrapped(syn, nodeA, p.pod.Addr4), nodeA, p.pod.Addr4), next, nil, ""},
		{"truncated", p.wrapped(syn[:14+20], nodeA, p.pod.Addr4), next, nil, ""},
		{"a probe", p.wrapped(echo(nodeA, p.pod.Addr4), nodeA, p.pod.Addr4), redirect, nil, "ANSWER_ECHO"},
		{"a probe from another address", p.wrapped(echo(client.Addr(), p.pod.Addr4), nodeA, p.pod.Addr4), shot, nil, "DROP_NO_TARGET"},
		{"an echo request to elsewhere", p.wrapped(echo(nodeA, client.Addr()), nodeA, p.pod.Addr4), shot, nil, "DROP_NO_TARGET"},
		{"an error about no connection", p.wrapped(unreachable, nodeA, p.pod.Addr4), shot, nil, "DROP_NO_TARGET"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before, err := p.reasons()
			if err != nil {
				t.Fatal(err)
			}
			err = p.at.Do(func() error {
				got, err := p.run(in, c.frame)
				if err != nil {
					return err
				}
				if got.Verdict != c.verdict {
					return fmt.Errorf("verdict %d, want %d", got.Verdict, c.verdict)
				}
				want := c.want
				if want == nil && c.verdict == next && c.reason == "" {
					want = c.frame // unmodified
				}
				if want != nil && !bytes.Equal(got.Frame, want) {
					return fmt.Errorf("the result is\n%s\nwant\n%s", packet.Parse(got.Frame), packet.Parse(want))
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
			after, err := p.reasons()
			if err != nil {
				t.Fatal(err)
			}
			if c.reason != "" && after[c.reason] == before[c.reason] {
				t.Errorf("not counted as %s", c.reason)
			}
			if unwrapped := after["UNWRAP"] > before["UNWRAP"]; unwrapped != (c.reason != "") {
				t.Errorf("taken out: %v", unwrapped)
			}
		})
	}

	// From hosts that are no nodes, once nodes are known.
	cluster := proxier.Cluster{Nodes: []netip.Addr{nodeA, p.node2.Addr6}, Pods: []netip.Prefix{netip.MustParsePrefix("100.64.7.0/24")}}
	if err := p.tier.SetCluster(cluster); err != nil {
		t.Fatal(err)
	}
	for i, from := range []netip.Addr{nodeA, client.Addr(), p.pod.Addr4} {
		frame := p.wrapped(bare(tcp(netip.AddrPortFrom(client.Addr(), uint16(6000+i)), here, packet.SYN)), from, p.pod.Addr4)
		var taken bool
		err := p.at.Do(func() error {
			got, err := p.run(in, frame)
			taken = err == nil && !bytes.Equal(got.Frame, frame)
			return err
		})
		if err != nil || taken != (from == nodeA) {
			t.Errorf("from %s: taken out %v, error %v", from, taken, err)
		}
	}

	// To a backend on another node, before and after its node answers probes.
	for _, ready := range []bool{false, true} {
		from := netip.AddrPortFrom(client.Addr(), 5000)
		if ready {
			p.tier.writer.SetDirect(map[netip.Addr]struct{}{remote: {}})
			from = netip.AddrPortFrom(client.Addr(), 5001)
		}
		got, err := p.ask(in, tcp(from, there, packet.SYN))
		if err != nil {
			t.Fatal(err)
		}
		direct := bytes.Equal(got.Frame, p.wrapped(bare(forwarded(tcp(from, there, packet.SYN))), p.at.Addr4, remote))
		if got.Verdict != redirect || direct != ready {
			t.Errorf("ready %v: verdict %d\n%x\nwant\n%x", ready, got.Verdict, got.Frame, p.wrapped(bare(forwarded(tcp(from, there, packet.SYN))), p.at.Addr4, remote))
		}
	}
	// Clients of the cluster may be on the backend's node: they are masqueraded.
	for _, from := range []string{nodeA.String(), "100.64.7.9", "10.244.2.9"} {
		got, err := p.ask(in, tcp(netip.AddrPortFrom(netip.MustParseAddr(from), 5002), there, packet.SYN))
		if err != nil || got.Verdict != redirect || !bytes.Contains(got.Frame, p.at.Addr4.AsSlice()) || bytes.Contains(got.Frame, netip.MustParseAddr(from).AsSlice()) {
			t.Errorf("from %s: verdict %d, error %v\n%x", from, got.Verdict, err, got.Frame)
		}
	}
	if peers := p.tier.writer.DirectPeers(); len(peers) != 1 || peers[0] != remote {
		t.Errorf("peers %v", peers)
	}
}
