// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/nfacct"
	"github.com/tandem-proxy/tandem/test/lab"
)

const (
	invalidDropped    = "kubeproxy_iptables_ct_state_invalid_dropped_packets_total"
	loopbackNodePorts = "kubeproxy_iptables_localhost_nodeports_accepted_packets_total"
)

// shows is the condition that /metrics has these lines.
func shows(n *lab.Node, lines ...string) func() error {
	return func() error {
		body, err := n.Fetch(context.Background(), 10249, "/metrics")
		for _, line := range lines {
			if err == nil && !strings.Contains(body, "\n"+line+"\n") {
				err = fmt.Errorf("/metrics lacks %q", line)
			}
		}
		return err
	}
}

// counterThere reports whether the kernel has the counter of loopback NodePorts.
func counterThere(n *lab.Node) (there bool, err error) {
	err = n.Do(func() error { _, err := nfacct.Kernel{}.Packets("localhost_nps_accepted_pkts"); return err })
	if errors.Is(err, nfacct.ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}

// Counters of rules survive restarts of the process, until --cleanup. They do not count what
// programs serve.
func TestRulePackets(t *testing.T) {
	s := newStage(t)
	if _, err := counterThere(s.node); errors.Is(err, nfacct.ErrNotSupported) {
		lab.SkipOrFailModule(t, err)
	}
	s.start("--proxy-mode=iptables")
	defer func() {
		s.end()
		if there, err := counterThere(s.node); there || err != nil {
			t.Errorf("left by --cleanup: counters (%v)", err)
		}
	}()
	ask := func() {
		t.Helper()
		if _, err := s.node.Ask(t.Context(), "tcp", netip.MustParseAddrPort("127.0.0.1:30080")); err != nil {
			t.Fatal(err)
		}
	}
	s.await(t, "metrics that begin with 0", shows(s.node, invalidDropped+" 0", loopbackNodePorts+" 0"))
	ask()
	s.await(t, "a connection to a NodePort at a loopback address", shows(s.node, invalidDropped+" 0", loopbackNodePorts+" 1"))
	_ = s.Close()
	s.process = nil
	s.start("--proxy-mode=iptables")
	ask()
	s.await(t, "another one, with the next process", shows(s.node, loopbackNodePorts+" 2"))
	s.start("--proxy-mode=ebpf")
	s.serves(t)
	ask()
	s.await(t, "no other", shows(s.node, loopbackNodePorts+" 2"))
}
