// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/tandem-proxy/tandem/test/kubeadm"
)

const charts = "Chart and kustomization"

const (
	chartFolder = "deploy/helm/tandem-kube-proxy"
	// earlierChart is an earlier version of it.
	earlierChart = "charts/tandem-kube-proxy-0.1.0.tgz"
)

// helmInstall is the page's command, with what is different in this cluster.
func (i *install) helmInstall(chart, more string) {
	i.tb.Helper()
	i.follow(charts, 0,
		chartFolder, chart, "https://10.0.0.1:6443", fmt.Sprintf("https://%s:6443", i.nodes[0].Addr4),
		"clusterCIDR=10.244.0.0/16", "'clusterCIDR={"+kubeadm.PodSubnet+"}' --set config.conntrack.maxPerCore=0 "+more)
	i.rollout("kube-system", "daemonset/tandem-kube-proxy")
}

const chartPods = "for pod in $(kubectl -n kube-system get pods -l app.kubernetes.io/name=tandem-kube-proxy -o name); do kubectl -n kube-system exec $pod -- "

// chart replaces upstream's DaemonSet by the chart, and goes back.
func (i *install) chart() {
	i.step("chart of an earlier version", func() {
		i.park()
		i.helmInstall(earlierChart, "")
		i.serves("ebpf")
		i.follows()
	})
	i.step("chart", func() {
		i.follow(charts, 5)
		i.serves("ebpf")
		i.follows()
		if out := i.run("helm list --namespace kube-system"); !strings.Contains(out, "tandem-kube-proxy-0.2.0") {
			i.tb.Errorf("no upgrade: %s", out)
		}
	})
	i.step("a rollout stops at a node that does not get ready", i.badNode)
	i.step("tandemctl", func() {
		i.await("kubectl -n kube-system exec ds/tandem-kube-proxy -- tandemctl status", "new ones are served")
	})
	i.step("iptables rules", func() {
		i.follow(charts, 2)
		i.serves("iptables")
		i.follows()
	})
	i.stopClients("outside") // its long connections would keep the programs
	i.step("detach", func() {
		i.run(chartPods + "tandemctl detach; done")
		if out := i.follow(charts, 3); strings.Count(out, noProgram) != len(i.nodes) {
			i.tb.Errorf("not on each node %q", noProgram)
		}
	})
	i.step("upstream", func() {
		i.follow(charts, 4)
		i.rollout("kube-system", "daemonset/kube-proxy")
		i.upstream()
	})
}

// badNode rolls the chart's DaemonSet out while /readyz of one node cannot be reached: the other node keeps
// the pod that it has, until that is repaired.
func (i *install) badNode() {
	good, bad := i.nodes[0], i.nodes[1]
	firewall := func(action string) {
		i.tb.Helper()
		if _, err := bad.run(i.tb.Context(), "iptables", action, "INPUT", "-p", "tcp", "--dport", "10256", "-j", "DROP"); err != nil {
			i.tb.Fatalf("%v", err)
		}
	}
	podOf := func(n *node) string {
		i.tb.Helper()
		return i.run("kubectl -n kube-system get pods -l app.kubernetes.io/name=tandem-kube-proxy -o name --field-selector spec.nodeName=" + n.Name)
	}
	before := map[*node]string{good: podOf(good), bad: podOf(bad)}
	firewall("-I")
	i.await("kubectl -n kube-system get daemonset tandem-kube-proxy -o 'jsonpath={.status.numberUnavailable}'", "1")
	i.run("kubectl -n kube-system rollout restart daemonset tandem-kube-proxy")
	if out, err := i.shell("kubectl -n kube-system rollout status --timeout=45s daemonset tandem-kube-proxy"); err == nil {
		i.tb.Errorf("the rollout ends although %s is not ready:\n%s", bad.Name, out)
	}
	if podOf(bad) == before[bad] || podOf(good) != before[good] {
		i.tb.Errorf("the rollout replaced the pod of %s: %v, and that of %s: %v", bad.Name, podOf(bad) != before[bad], good.Name, podOf(good) != before[good])
	}
	firewall("-D")
	i.rollout("kube-system", "daemonset/tandem-kube-proxy")
	if podOf(good) == before[good] {
		i.tb.Errorf("the rollout does not go on at %s", good.Name)
	}
}

// coexistence has the chart serve a part of the traffic beside upstream's DaemonSet.
func (i *install) coexistence() {
	values := filepath.Join(i.dir, "values.yaml")
	if err := os.WriteFile(values, []byte(i.block("Other distributions", 0)), 0o644); err != nil {
		i.tb.Fatalf("%v", err)
	}
	i.step("chart beside upstream", func() {
		i.helmInstall(chartFolder, "-f "+values)
		i.await("kubectl -n kube-system exec ds/tandem-kube-proxy -- tandemctl status", "new ones are served")
		i.follows()
	})
	i.step("restart of upstream beside it", func() {
		i.run("kubectl -n kube-system rollout restart daemonset kube-proxy")
		i.rollout("kube-system", "daemonset/kube-proxy")
		i.follows()
	})
	i.step("uninstall", func() {
		i.run("helm uninstall tandem --namespace kube-system --wait")
		i.onNodes(ours, "/usr/local/bin/kube-proxy", "--cleanup", "--coexist=socket-lb", "--proxy-mode=ebpf")
		i.upstream()
	})
}

// restart has a node reboot while it serves. Connections to it fail meanwhile.
func (i *install) restart() {
	i.step("patch", i.patch)
	n := i.nodes[1]
	i.stopClients()
	began := time.Now()
	if err := n.shutDown(i.top); err != nil {
		i.tb.Fatalf("shut %s down: %v", n.Name, err)
	}
	n.start(i.top)
	i.await("kubectl -n kube-system get pods -o wide --field-selector spec.nodeName="+n.Name+" -l k8s-app=kube-proxy -o jsonpath={.items[0].status.containerStatuses[0].restartCount}", "1")
	i.answers("ebpf", "/readyz") // as it starts from nothing
	i.rollout("default", "deployment/"+steady, "deployment/"+changing)
	i.startClients()
	i.tb.Logf("%s served again after %v", n.Name, time.Since(began).Round(time.Second))
	i.step("after the restart", i.follows)
	i.step("roll back", i.rollBack)
	i.detach()
}
