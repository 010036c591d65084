// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

const healthCheckNodePort = 32000

// checked is a Service whose health checks load balancers query on each node.
var checked = strings.Replace(loadBalancer, "externalTrafficPolicy: Cluster",
	fmt.Sprintf("externalTrafficPolicy: Local\n  healthCheckNodePort: %d", healthCheckNodePort), 1)

// probe queries a health check as a load balancer does, and fails unless it gets this answer.
func probe(from *lab.Sandbox, node netip.Addr, want string) func() error {
	client, url := from.HTTPClient(time.Second), "http://"+netip.AddrPortFrom(node, healthCheckNodePort).String()
	return func() error {
		got := "no answer"
		if response, err := client.Get(url); err == nil {
			response.Body.Close()
			got = fmt.Sprintf("%d, weight %s", response.StatusCode, response.Header.Get("X-Load-Balancing-Endpoint-Weight"))
		}
		if got != want {
			return fmt.Errorf("%s gets %q from %s, want %q", from.Name, got, node, want)
		}
		return nil
	}
}

// TestHealthChecks checks that health checks report the node's endpoints in every mode. In modes
// with rules, they do so even if the host's own rules drop all incoming packets.
func TestHealthChecks(t *testing.T) {
	for _, mode := range []string{"ebpf", "iptables", "ipvs"} {
		t.Run(mode, func(t *testing.T) {
			s := newStage(t)
			too := serve(t, s.node.Pod("too"))
			if mode == "ipvs" {
				upstream.NeedsIPVS(t, s.node)
			}
			if mode != "ebpf" {
				keepOut(t, s.node)
			}
			writeManifests(t, s.dir, checked, s.here, s.there)
			s.start("--proxy-mode=" + mode)
			defer s.end()
			answers := func(what, want string) {
				t.Helper()
				for _, at := range []netip.Addr{s.node.Addr4, s.node.Addr6} {
					s.await(t, what, probe(s.far.Sandbox, at, want))
				}
			}
			answers("one endpoint here", "200, weight 1")
			writeManifests(t, s.dir, checked, s.here, s.there, too)
			answers("two endpoints here", "200, weight 2")
			writeManifests(t, s.dir, checked, s.there)
			answers("no endpoint here", "503, weight 0")
			writeManifests(t, s.dir, checked, too)
			answers("an endpoint came", "200, weight 1")
			writeManifests(t, s.dir, loadBalancer, too)
			answers("externalTrafficPolicy: Cluster", "no answer")
			writeManifests(t, s.dir, strings.Replace(checked, `, "fd00:10:96::10"]`, "]", 1), too)
			answers("Local again, for a Service of one family", "200, weight 1")
			s.Terminate(t)
			answers("the process is gone", "no answer")
		})
	}
}

// TestHealthCheckPortTaken: another process holds the port for a while, in one family.
func TestHealthCheckPortTaken(t *testing.T) {
	s := newStage(t)
	writeManifests(t, s.dir, checked, s.here)
	held, err := s.node.Listen(fmt.Sprintf("0.0.0.0:%d", healthCheckNodePort))
	if err != nil {
		t.Fatal(err)
	}
	s.start()
	defer s.end()
	s.await(t, "the other family", probe(s.far.Sandbox, s.node.Addr6, "200, weight 1"))
	s.await(t, "the problem", s.Says(`reason="FailedToStartServiceHealthcheck"`))
	held.Close()
	s.await(t, "the port is free", probe(s.far.Sandbox, s.node.Addr4, "200, weight 1"))
}

// keepOut adds rules of the host that drop all packets from its uplink.
func keepOut(t *testing.T, n *lab.Node) {
	t.Helper()
	if _, err := xtables.New(xtables.NFT); err != nil {
		lab.SkipOrFail(t, err)
	}
	for _, program := range []string{"iptables-nft", "ip6tables-nft"} {
		out, err := n.Command(context.Background(), program, "-w", "-A", "INPUT", "-i", lab.Uplink, "-p", "tcp", "-j", "DROP").CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", program, err, out)
		}
	}
}
