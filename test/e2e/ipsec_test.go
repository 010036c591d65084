// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"errors"
	"net"
	"net/netip"
	"os/exec"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/test/lab"
)

// TestIPsec: what a policy of IPsec says of packets to endpoints on other nodes holds for clients outside,
// too. Programs would redirect their packets past it. A policy that is added ends the process, and the next
// one leaves these clients to rules.
func TestIPsec(t *testing.T) {
	s := newStage(t)
	defer s.end()
	writeManifests(t, s.dir, loadBalancer, s.there)
	s.start("--proxy-mode=ebpf")
	to := netip.AddrPortFrom(s.node.Addr4, 30080)
	served := reaches(s.far.Sandbox, to, "there")
	s.await(t, "programs to serve a client outside", served)

	dst := &net.IPNet{IP: s.there.Addr4.AsSlice(), Mask: net.CIDRMask(32, 32)}
	src := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
	policy := &netlink.XfrmPolicy{Src: src, Dst: dst, Dir: netlink.XFRM_DIR_OUT, Action: netlink.XFRM_POLICY_BLOCK}
	if err := s.node.Do(func() error { return netlink.XfrmPolicyAdd(policy) }); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := s.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Fatalf("the process ended with %v, want exit code 1", err)
	}
	s.process = start(t, s.node, s.dir, "--proxy-mode=ebpf")
	s.synced(t)
	arriving, err := s.there.Capture(lab.Uplink, func(c lab.Captured) bool {
		return !c.Outgoing && c.Destination() == netip.AddrPortFrom(s.there.Addr4, targetPort)
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := served(); err == nil {
		t.Error("a client outside reached an endpoint that a policy of IPsec blocks")
	}
	if list := arriving.Packets(); len(list) > 0 {
		t.Errorf("packets passed the policy:\n%v", list)
	}
	if err := s.node.Do(func() error { return netlink.XfrmPolicyDel(policy) }); err != nil {
		t.Fatal(err)
	}
	s.await(t, "rules to serve a client outside", served)
}
