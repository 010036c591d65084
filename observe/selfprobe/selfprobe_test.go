// SPDX-License-Identifier: Apache-2.0

//go:build linux

package selfprobe

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

// TestProbes: what leads to an endpoint is found. Programs are not needed to see where a
// socket leads: one that dials the endpoint itself does.
func TestProbes(t *testing.T) {
	if _, err := xtables.New(xtables.NFT); err != nil {
		lab.SkipOrFail(t, err)
	}
	n := lab.NewT(t, lab.Options{Nodes: lab.NodeSettings{Conntrack: true}}).Node("node1")
	pod := n.Pod("pod")
	if _, err := pod.ServeTCP(8080); err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort
	for _, tt := range []struct {
		iptables     string
		vip, backend netip.AddrPort
	}{
		{"iptables-nft", at("10.96.0.10:80"), netip.AddrPortFrom(pod.Addr4, 8080)},
		{"ip6tables-nft", at("[fd00:10:96::10]:80"), netip.AddrPortFrom(pod.Addr6, 8080)},
	} {
		probe := func(by func(context.Context, Frontend) (netip.AddrPort, error), protocol inet.Protocol, to netip.AddrPort) (leads netip.AddrPort, err error) {
			derr := n.Do(func() error {
				leads, err = by(t.Context(), Frontend{Protocol: protocol, Addr: to, Backends: []netip.AddrPort{tt.backend}})
				return nil
			})
			return leads, errors.Join(derr, err)
		}
		for _, protocol := range []inet.Protocol{inet.TCP, inet.UDP} {
			if to, err := probe(BySocket, protocol, tt.vip); !errors.Is(err, errNotTranslated) {
				t.Errorf("%s by socket: leads to %s, error %v", protocol, to, err)
			}
		}
		if to, err := probe(BySocket, inet.UDP, tt.backend); err != nil || to != tt.backend {
			t.Errorf("to the endpoint itself: leads to %s, error %v", to, err)
		}
		if to, err := probe(ByPackets, inet.TCP, tt.vip); !errors.Is(err, errNotTranslated) {
			t.Errorf("without a rule: leads to %s, error %v", to, err)
		}
		out, err := n.Command(t.Context(), tt.iptables, "-w", "-t", "nat", "-A", "OUTPUT", "-d", tt.vip.Addr().String(), "-p", "tcp", "--dport", "80",
			"-j", "DNAT", "--to-destination", tt.backend.String()).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", tt.iptables, err, out)
		}
		if to, err := probe(ByPackets, inet.TCP, tt.vip); err != nil || to != tt.backend {
			t.Errorf("with a rule: leads to %s, error %v", to, err)
		}
	}
}
