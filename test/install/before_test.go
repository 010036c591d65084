// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

import (
	"fmt"
	"strings"

	"github.com/tandem-proxy/tandem/test/lab"
)

// before runs preflight and shadow in the pod of docs/preflight.md, beside upstream's kube-proxy.
func (i *install) before() {
	i.step("preflight", func() {
		out, code := i.pod(i.nodes[0], "tandemctl, preflight]      # or: shadow, --for=10m", "tandemctl, preflight]")
		if code != "0" && code != "1" {
			i.tb.Errorf("preflight ends with %s:\n%s", code, out)
		}
		for _, want := range []string{"ebpf on Linux", "another kube-proxy runs in mode iptables"} {
			if !strings.Contains(out, want) {
				i.tb.Errorf("preflight does not say %q:\n%s", want, out)
			}
		}
		i.tb.Logf("%s", out)
	})
	i.step("shadow", func() {
		out, code := i.pod(i.nodes[0], "tandemctl, preflight]      # or: shadow, --for=10m", "tandemctl, shadow, --for=15s, --settle=3s]")
		if code != "0" || !strings.Contains(out, " 0 disagree") {
			i.tb.Errorf("shadow ends with %s:\n%s", code, out)
		}
		i.tb.Logf("%s", out)
	})
}

// pod runs the page's pod on a node, and returns its log and exit code.
func (i *install) pod(n *node, replace ...string) (out, code string) {
	i.tb.Helper()
	manifest := i.preflight["Run them on a node"][0]
	for _, pair := range [][2]string{{"NODE\n", n.Name + "\n"}, {replace[0], replace[1]}} {
		if !strings.Contains(manifest, pair[0]) {
			i.tb.Fatalf("the pod of preflight.md has no %q:\n%s", pair[0], manifest)
		}
		manifest = strings.Replace(manifest, pair[0], pair[1], 1)
	}
	return i.once(manifest, "tandem-preflight")
}

// once runs a pod of namespace kube-system until it ends, and removes it.
func (i *install) once(manifest, name string) (out, code string) {
	i.tb.Helper()
	i.apply(manifest)
	lab.Await(i.tb, patience, "the end of pod "+name, func() error {
		code = i.kubectl("-n", "kube-system", "get", "pod", name, "-o=jsonpath={.status.containerStatuses[0].state.terminated.exitCode}")
		if code == "" {
			return fmt.Errorf("it runs")
		}
		return nil
	})
	out = i.kubectl("-n", "kube-system", "logs", name)
	i.kubectl("-n", "kube-system", "delete", "pod", name, "--wait")
	return out, code
}

// onNodes runs an image once on each node: privileged, and in the network of the host.
func (i *install) onNodes(image string, command ...string) {
	i.tb.Helper()
	for _, n := range i.nodes {
		out, code := i.once(fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: once, namespace: kube-system}
spec:
  nodeName: %s
  hostNetwork: true
  restartPolicy: Never
  tolerations: [{operator: Exists}]
  containers: [{name: once, image: "%s", command: [%s], securityContext: {privileged: true}}]
`, n.Name, image, strings.Join(command, ", ")), "once")
		if code != "0" {
			i.tb.Fatalf("%s on %s ends with %s:\n%s", command, n.Name, code, out)
		}
		i.tb.Logf("%s on %s:\n%s", command, n.Name, out)
	}
}
