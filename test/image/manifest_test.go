// SPDX-License-Identifier: Apache-2.0

//go:build linux

package image_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/nfacct"
	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier/ipvs"
	"github.com/tandem-proxy/tandem/test/container"
	"github.com/tandem-proxy/tandem/test/lab"
)

// manifests are what the chart installs, by mode.
var manifests = map[string]string{
	"ebpf": "../../deploy/kustomize/base/kube-proxy.yaml", "iptables": "../deploy/testdata/chart-iptables.yaml", "ipvs": "../deploy/testdata/chart-ipvs.yaml",
}

// readManifest returns what decides how kube-proxy runs.
func readManifest(t *testing.T, file string) (ds appsv1.DaemonSet, cm v1.ConfigMap) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	documents := utilyaml.NewYAMLReader(bufio.NewReader(f))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return ds, cm
		}
		var kind metav1.TypeMeta
		if err == nil {
			err = yaml.Unmarshal(document, &kind)
		}
		switch {
		case err != nil:
		case kind.Kind == "DaemonSet":
			err = yaml.Unmarshal(document, &ds)
		case kind.Kind == "ConfigMap":
			err = yaml.Unmarshal(document, &cm)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// fromManifest is a container of a pod, with what is in this cluster in place of what is on
// a node.
func (c *cluster) fromManifest(t *testing.T, pod *v1.PodSpec, of *v1.Container, cm *v1.ConfigMap) container.Container {
	t.Helper()
	node := map[string]string{
		"/sys/fs/cgroup":             c.node.CgroupPath(),
		config.DefaultStateDirectory: c.volume(t, "state-of-"+of.Name, nil),
	}
	for _, m := range c.kubeadm(t, "").Mounts {
		node[m.To] = m.From
	}
	files := map[string]string{}
	for name, text := range cm.Data {
		files[name] = strings.ReplaceAll(text, "https://api-server.example:6443", apiURL)
	}
	configuration := c.volume(t, "config-of-"+of.Name, files)
	made, err := container.Of(pod, of, c.node, node[container.ServiceAccount], func(v *v1.Volume) (string, error) {
		switch {
		case v.ConfigMap != nil:
			return configuration, nil
		case v.HostPath != nil && node[v.HostPath.Path] != "":
			return node[v.HostPath.Path], nil
		}
		return "", fmt.Errorf("nothing here stands for its volume %s", v.Name)
	})
	if err != nil {
		t.Fatal(err)
	}
	made.Layers, made.Args = c.layers, append(made.Args, "-v=2")
	return made
}

// TestChart runs what the chart installs: the capabilities that it names for a mode are
// enough for it, also on a node with AppArmor. The last cases have those that docs/install.md calls necessary.
func TestChart(t *testing.T) {
	c := newCluster(t)
	for _, tt := range []struct {
		name, installed string
		appArmor        string
		capabilities    []string // instead of those that are named
		mode            string   // that runs
	}{
		{"ebpf", "ebpf", "", nil, "ebpf"},
		{"ipvs", "ipvs", "", nil, "ipvs"},
		{"iptables", "iptables", "", nil, "iptables"},
		{"ebpf under AppArmor", "ebpf", container.AppArmorProfile, nil, "ebpf"},
		{"ipvs under AppArmor", "ipvs", container.AppArmorProfile, nil, "ipvs"},
		{"iptables under AppArmor", "iptables", container.AppArmorProfile, nil, "iptables"},
		{"least of ebpf", "ebpf", "", []string{"NET_ADMIN", "SYS_ADMIN"}, "ebpf"},
		{"least of iptables", "iptables", "", []string{"NET_ADMIN"}, "iptables"},
		{"ebpf without SYS_ADMIN", "ebpf", "", []string{"NET_ADMIN"}, "iptables"},
		{"ebpf with BPF instead of SYS_ADMIN", "ebpf", "", []string{"NET_ADMIN", "BPF", "PERFMON"}, "iptables"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.mode == "ipvs" {
				c.needsIPVS(t)
			}
			if tt.appArmor != "" {
				if err := container.LoadAppArmorProfile(); err != nil {
					lab.SkipOrFailModule(t, err)
				}
			}
			ds, cm := readManifest(t, manifests[tt.installed])
			pod := &ds.Spec.Template.Spec
			for i := range pod.InitContainers {
				made := c.fromManifest(t, pod, &pod.InitContainers[i], &cm)
				c.run(t, made, made.Args...)
			}
			made := c.fromManifest(t, pod, &pod.Containers[0], &cm)
			made.AppArmor = tt.appArmor
			if tt.capabilities != nil {
				made.Capabilities = tt.capabilities
			}
			if tt.mode == "ipvs" {
				// Its rules match ipsets, which tools cannot list with the least capabilities.
				defer c.cleanup(t)
			}
			p := c.start(t, made)
			defer p.Close()
			c.serves(t)
			c.runs(t, tt.mode)
			// The image has the match by which rules count, too.
			shown, err := c.node.Fetch(t.Context(), 10249, "/metrics")
			if counts := strings.Contains(shown, "kubeproxy_iptables_ct_state_invalid_dropped_packets_total"); err != nil || counts != (c.hasCounters(t) && tt.mode != "ipvs") {
				t.Errorf("/metrics shows what rules count: %v, error %v", counts, err)
			}
			if status := c.run(t, made, "/usr/local/bin/tandemctl", "status"); !strings.HasPrefix(status, "Mode:") || !strings.Contains(strings.SplitN(status, "\n", 2)[0], tt.mode) {
				t.Errorf("tandemctl status does not begin with mode %s:\n%s", tt.mode, status)
			}
			if archive := c.run(t, made, "/usr/local/bin/tandemctl", "sysdump", "--file=-"); !strings.HasPrefix(archive, "\x1f\x8b") {
				t.Errorf("tandemctl sysdump writes no archive: %.200q", archive)
			}
			if tt.mode == "ebpf" {
				may := slices.Contains(made.Capabilities, "SYS_PTRACE")
				if tt.appArmor != "" {
					// Pods without a process that is confined alike are hidden, such as this one.
					c.expectClosed(t, false)
					confined := lab.Watch(c.client.Command(context.Background(), "aa-exec", "-p", tt.appArmor, "--", "sleep", "1000"))
					confined.Begin(t)
					defer confined.Close()
				}
				c.expectClosed(t, may)
			}
		})
	}
	c.cleanup(t)
	if len(c.refused) > 0 {
		t.Errorf("requests that kubeadm's RBAC does not allow: %q", c.refused)
	}
}

func (c *cluster) cleanup(t *testing.T) {
	t.Helper()
	c.run(t, c.kubeadm(t, "iptables"), "/usr/local/bin/kube-proxy", "--cleanup", "--config=/var/lib/kube-proxy/config.conf")
}

// hasCounters reports whether the kernel has counters for rules.
func (c *cluster) hasCounters(t *testing.T) bool {
	t.Helper()
	err := c.node.Do(func() error { _, err := nfacct.Kernel{}.Packets("ct_state_invalid_dropped_pkts"); return err })
	if err != nil && !errors.Is(err, nfacct.ErrNotFound) && !errors.Is(err, nfacct.ErrNotSupported) {
		t.Fatal(err)
	}
	return !errors.Is(err, nfacct.ErrNotSupported)
}

func (c *cluster) expectClosed(t *testing.T, want bool) {
	t.Helper()
	if closed := c.closes(t); closed != want {
		t.Errorf("a UDP socket of a pod whose endpoint is gone was closed: %v, want %v", closed, want)
	}
}

// closes reports whether a UDP socket of a pod is closed when its endpoint goes, which takes a
// look into the pod's network namespace.
func (c *cluster) closes(t *testing.T) bool {
	t.Helper()
	defer c.endpoints(c.here, c.there)
	c.endpoints(c.here)
	leads := func(to *lab.Pod) net.Conn {
		var conn net.Conn
		lab.Await(t, patience, "a socket that leads to "+to.Name, func() error {
			dialed, err := c.client.Dial(t.Context(), "udp", vip4)
			if err != nil {
				return err
			}
			t.Cleanup(func() { dialed.Close() })
			reply, err := lab.AskConn(t.Context(), dialed)
			if err == nil && reply.Server != to.Name {
				err = fmt.Errorf("it leads to %s", reply.Server)
			}
			conn = dialed
			return err
		})
		return conn
	}
	open := leads(c.here)
	c.endpoints(c.there)
	leads(c.there)
	if err := open.SetReadDeadline(time.Now().Add(2 * time.Second)); err != nil {
		t.Fatal(err)
	}
	_, err := open.Read(make([]byte, 1))
	return errors.Is(err, unix.ECONNABORTED)
}

func (c *cluster) needsIPVS(t *testing.T) {
	t.Helper()
	tools, err := xtables.New(xtables.NFT)
	if err == nil {
		err = c.node.Do(func() error { return ipvs.CanUse(t.Context(), ipvs.Options{Tools: tools}) })
	}
	if err != nil {
		lab.SkipOrFailModule(t, err)
	}
}
