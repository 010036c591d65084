// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"fmt"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// TestRollBack: one ConfigMap, whose mode is iptables, works for both binaries. A flag of the
// DaemonSet makes ours use eBPF nevertheless; upstream's ignores it. So a rollback only changes
// the image, after --cleanup by ours.
func TestRollBack(t *testing.T) {
	binary := upstream.BinaryT(t)
	c := newCluster(t, 1, inMode("iptables"))
	n := c.nodes[0]
	web1, web2 := c.run(n, "web", "web-1"), c.run(n, "web", "web-2")
	inside := []*lab.Sandbox{n.Sandbox, n.Pod("shell").Sandbox}
	const flag = "--proxy-mode=ebpf"
	to := vip(c.expose("web"), 0)

	theirs := c.start(n, binary)
	theirs.programmed()
	theirs.mode("iptables")
	c.answer("upstream's before", to, inside, web1, web2)
	_ = theirs.Close()

	ours := c.start(n, ourBinary(t), flag)
	ours.programmed()
	ours.mode("ebpf")
	c.answer("ours", to, inside, web1, web2)
	ours.await("no rules of upstream's", func() error {
		out, err := n.Command(t.Context(), "iptables-save").Output()
		if err == nil && strings.Contains(string(out), "KUBE-SVC-") {
			err = fmt.Errorf("there are:\n%s", out)
		}
		return err
	})
	ours.terminate()
	// Programs would continue to serve without the process.
	cleanup := c.start(n, ourBinary(t), flag, "--cleanup")
	if err := cleanup.Wait(); err != nil {
		t.Fatalf("%s --cleanup: %v", flag, err)
	}
	c.silent("no proxy serves", to, inside...)

	theirs = c.start(n, binary, flag)
	theirs.programmed()
	theirs.mode("iptables")
	web3 := c.run(n, "web", "web-3")
	c.answer("upstream's again", to, inside, web1, web2, web3)
	c.nothingRefused()
}
