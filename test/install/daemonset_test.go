// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

import (
	"os"
	"path/filepath"
	"strings"
	"time"
)

// patch changes image and mode of kubeadm's DaemonSet, as the page begins.
func (i *install) patch() {
	i.tb.Helper()
	i.follow("kubeadm and kind", 0)
	i.serves("ebpf")
	i.follows()
}

// toImage is what the page calls changing the image.
func (i *install) toImage(name string) {
	i.tb.Helper()
	i.follow("kubeadm and kind", 0, ours, name)
	i.serves("ebpf")
	i.follows()
}

// upstreamRevision is the DaemonSet's revision with upstream's image, which the page's first command
// finds.
func (i *install) upstreamRevision() string {
	i.tb.Helper()
	find, _, _ := strings.Cut(i.block("Roll back", 0), "kubectl -n kube-system rollout undo")
	out := i.run(find)
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) == 2 && strings.HasPrefix(f[1], "registry.k8s.io/kube-proxy:") {
			return f[0]
		}
	}
	i.tb.Fatalf("no revision has upstream's image:\n%s", out)
	return ""
}

// rollBack goes to the revision with upstream's image.
func (i *install) rollBack() {
	i.tb.Helper()
	i.follow("Roll back", 0, "--to-revision=1 ", "--to-revision="+i.upstreamRevision()+" ")
	i.upstream()
}

// upstream waits until upstream's kube-proxy serves, and its rules alone count.
func (i *install) upstream() {
	i.tb.Helper()
	i.serves("iptables")
	i.follows()
}

func (i *install) patchUpgradeRollBack() {
	i.step("patch", i.patch)
	i.step("see that it works", func() {
		i.await(i.block("Check that it works", 0), "new ones are served")
	})
	i.step("cleanup beside the process", func() {
		out, err := i.shell("kubectl -n kube-system exec ds/kube-proxy -- kube-proxy --cleanup --config=/var/lib/kube-proxy/config.conf")
		if err == nil || !strings.Contains(out, "a kube-proxy serves this node, so nothing was cleaned up") {
			i.tb.Errorf("--cleanup beside a process that serves: error %v\n%s", err, out)
		}
		i.follows()
	})
	i.step("upgrade", func() {
		i.toImage(next)
		i.await("kubectl -n kube-system logs ds/kube-proxy", "adopted=true")
	})
	i.step("upgrade to another layout", func() {
		i.toImage(other)
		i.await("kubectl -n kube-system exec ds/kube-proxy -- tandemctl status", "1000")
	})
	i.step("downgrade", func() { i.toImage(ours) })
	i.step("roll back", i.rollBack)
	i.detach()
}

// detach removes programs that leave connections to upstream's kube-proxy.
func (i *install) detach() {
	i.tb.Helper()
	i.stopClients() // programs translate connections of theirs
	i.onNodes(ours, "tandemctl", "detach")
}

// carefully has Tandem write upstream's rules first.
func (i *install) carefully() {
	i.step("iptables rules first", func() {
		i.follow("kubeadm and kind", 0, "> patch.yaml", "| sed s/--proxy-mode=ebpf/--proxy-mode=iptables/ > patch.yaml")
		i.serves("iptables")
		i.follows()
	})
	i.step("patch", i.patch)
	i.step("roll back", i.rollBack)
	i.detach()
}

func (i *install) undoAlone() {
	i.step("patch", i.patch)
	i.step("rollout undo", func() {
		i.run("kubectl -n kube-system rollout undo daemonset kube-proxy")
		i.rollout("kube-system", "daemonset/kube-proxy")
		i.upstream()
	})
	i.detach()
}

const noProgram = "no program of Tandem is attached"

func (i *install) withoutGrace() {
	i.step("patch", i.patch)
	i.step("iptables rules", func() {
		i.follow("Roll back", 1)
		i.serves("iptables")
		i.follows()
	})
	// Its long connections would keep the programs.
	i.stopClients("outside")
	i.step("detach", func() {
		i.run("for pod in $(kubectl -n kube-system get pods -l k8s-app=kube-proxy -o name); do kubectl -n kube-system exec $pod -- tandemctl detach; done")
		if out := i.follow("Roll back", 2); strings.Count(out, noProgram) != len(i.nodes) {
			i.tb.Errorf("not on each node %q", noProgram)
		}
	})
	i.step("roll back", i.rollBack)
}

// cleanup removes everything from nodes without a kube-proxy. Services are down until the next one serves.
// Afterwards a connect may fail that has the source port of one that began meanwhile. A start of Tandem ends
// that. Beside upstream's, what the page says ends it, and ours leaves no more of it than upstream's.
func (i *install) cleanup() {
	theirs := i.upstreamAfterOutage("upstream's kube-proxy")
	i.outage(func() {
		i.follow("kubeadm and kind", 0)
		_, unpark, _ := strings.Cut(i.block(charts, 4), "\n")
		i.run(unpark)
		i.rollout("kube-system", "daemonset/kube-proxy")
		i.serves("ebpf")
	})
	i.step("ours, after a cleanup", func() { time.Sleep(baselineTime) })
	if with := i.upstreamAfterOutage("ours"); with > 2*theirs+0.01 {
		i.tb.Errorf("the part %g fails after a cleanup, and %g where upstream's kube-proxy ran", with, theirs)
	}
}

// outage ends the kube-proxy that runs, cleans nodes up, and starts the next one.
func (i *install) outage(next func()) {
	i.tb.Helper()
	i.park()
	i.onNodes(ours, "/usr/local/bin/kube-proxy", "--cleanup")
	next()
	i.follows()
}

// upstreamAfterOutage returns the part of attempts that fail when upstream's kube-proxy serves after an
// outage.
func (i *install) upstreamAfterOutage(of string) float64 {
	i.tb.Helper()
	revision := i.upstreamRevision()
	i.outage(func() {
		i.run("kubectl -n kube-system rollout undo daemonset kube-proxy --to-revision=" + revision)
		i.rollout("kube-system", "daemonset/kube-proxy")
		i.serves("iptables")
	})
	tried, failed := i.count(func() { time.Sleep(baselineTime) })
	i.tb.Logf("STEP upstream's, after a cleanup where %s ran: %d of %d failed", of, failed, tried)
	for _, n := range i.nodes {
		out, _ := n.run(i.tb.Context(), "bash", "-c", i.block("Roll back", 3)) // an error if there are none
		i.tb.Logf("%s", out)
	}
	i.step("after conntrack -D", func() { time.Sleep(baselineTime) })
	return float64(failed) / float64(tried)
}

// park takes kubeadm's DaemonSet from all nodes, as the page does.
func (i *install) park() {
	i.tb.Helper()
	commands, _, _ := strings.Cut(i.block(charts, 1), "helm install")
	i.run(commands)
	i.kubectl("-n", "kube-system", "wait", "--for=delete", "--timeout=60s", "pod", "--selector=k8s-app=kube-proxy")
}

// setMode edits the ConfigMap, and restarts pods as the page says.
func (i *install) setMode(mode string) {
	i.tb.Helper()
	i.run(`kubectl -n kube-system get configmap kube-proxy -o yaml | sed 's/^\( *mode:\).*/\1 "` + mode + `"/' | kubectl apply -f -`)
	i.run("kubectl -n kube-system rollout restart daemonset kube-proxy")
	i.rollout("kube-system", "daemonset/kube-proxy")
}

func (i *install) configMap() {
	i.step("image", func() {
		i.follow("kubeadm and kind", 0, "> patch.yaml", "| grep -v args: > patch.yaml")
		i.serves("iptables")
	})
	i.step("ConfigMap", func() {
		i.setMode("ebpf")
		i.serves("ebpf")
		i.follows()
	})
	i.step("ConfigMap back", func() {
		i.setMode("")
		i.serves("iptables")
		i.follows()
	})
	i.step("image back", i.rollBack)
	i.detach()
}

// optOuts has clients' pod opt out of socket load balancing, by annotation and by its namespace's label.
func (i *install) optOuts() {
	i.step("patch", i.patch)
	i.step("permission", func() {
		i.follow("Opt-outs of pods", 0)
		i.rollout("kube-system", "daemonset/kube-proxy")
		i.serves("ebpf")
	})
	const list = "kubectl -n kube-system exec $(kubectl -n kube-system get pods -l k8s-app=kube-proxy --field-selector spec.nodeName=node1 -o name) -- tandemctl optout list"
	for _, test := range []struct{ name, optOut, undo string }{
		{"annotation", "kubectl annotate pod -l app=client tandem-proxy.dev/socket-lb=disabled", "kubectl annotate pod -l app=client tandem-proxy.dev/socket-lb-"},
		{"label", "kubectl label namespace default tandem-proxy.dev/socket-lb=disabled", "kubectl label namespace default tandem-proxy.dev/socket-lb-"},
	} {
		i.step(test.name, func() {
			i.run(test.optOut)
			i.await(list, " pod ")
			i.follows()
		})
		i.step("without the "+test.name, func() {
			i.run(test.undo)
			i.await("out=$("+list+"); ! grep -w pod <<<\"$out\" && echo none", "none")
			i.follows()
		})
	}
	i.step("roll back", i.rollBack)
	i.detach()
	i.run("kubectl delete -f deploy/kubeadm/opt-outs.yaml")
}

// kubeadmUpgrade does what kubeadm upgrade does to kube-proxy, with the patch and without.
func (i *install) kubeadmUpgrade() {
	i.step("patch", i.patch)
	i.step("kubeadm upgrade --patches", func() {
		i.follow("kubeadm and kind", 1)
		patch, err := os.ReadFile(filepath.Join(i.dir, "patches/kubeproxydaemonset.yaml"))
		if err == nil {
			err = i.nodes[0].write("etc/patches/kubeproxydaemonset.yaml", string(patch))
		}
		if err != nil {
			i.tb.Fatalf("%v", err)
		}
		i.onFirst("kubeadm-upgrade", "upgrade", "apply", "phase", "addon", "kube-proxy", i.version, "--patches=/etc/patches")
		i.rollout("kube-system", "daemonset/kube-proxy")
		if image := i.run("kubectl -n kube-system get daemonset kube-proxy -o jsonpath={.spec.template.spec.containers[0].image}"); image != ours {
			i.tb.Fatalf("the image is %s", image)
		}
		i.serves("ebpf")
		i.follows()
	})
	i.step("kubeadm upgrade", func() {
		i.onFirst("kubeadm", "init", "phase", "addon", "kube-proxy", "--config=/etc/kubeadm.yaml")
		i.rollout("kube-system", "daemonset/kube-proxy")
		i.upstream()
	})
	i.detach()
}

// onFirst runs a command on the first node, which has to succeed.
func (i *install) onFirst(command ...string) {
	i.tb.Helper()
	out, err := i.nodes[0].run(i.tb.Context(), command...)
	if err != nil {
		i.tb.Fatalf("%v", err)
	}
	i.tb.Logf("%s\n%s", strings.Join(command, " "), out)
}
