// SPDX-License-Identifier: Apache-2.0

// Package deploy checks everything for installation: the chart, the kustomization, the patch
// for kubeadm, alerts and the dashboard. It is a module of its own, because the libraries of the
// tools that read these are large.
package deploy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/test/golden"
)

const chart = "../../deploy/helm/tandem-kube-proxy"

// required are the values without a default.
func required(more map[string]any) map[string]any {
	values := map[string]any{
		"image":     map[string]any{"repository": "registry.example/kube-proxy", "tag": "unset"},
		"apiServer": "https://api-server.example:6443",
	}
	maps.Copy(values, more)
	return values
}

// renderFiles returns what helm makes of each template. Values have to match the schema.
func renderFiles(values map[string]any) (map[string]string, error) {
	loaded, err := loader.Load(chart)
	if err != nil {
		return nil, err
	}
	all, err := util.ToRenderValues(loaded, values, common.ReleaseOptions{Name: "tandem", Namespace: "kube-system", IsInstall: true, Revision: 1}, common.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	return engine.Render(loaded, all)
}

// render returns the output of helm template, without its own comments.
func render(values map[string]any) (string, error) {
	files, err := renderFiles(values)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		for _, document := range strings.Split("\n"+files[name], "\n---\n") {
			if document = strings.TrimSpace(document); document != "" && strings.HasSuffix(name, ".yaml") {
				fmt.Fprintf(&b, "---\n%s\n", document)
			}
		}
	}
	return b.String(), nil
}

func mustRender(t *testing.T, more map[string]any) string {
	t.Helper()
	text, err := render(required(more))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func init() { utilruntime.Must(monitoringv1.AddToScheme(scheme.Scheme)) }

// decode decodes objects like an API server with strict field validation.
func decode(t *testing.T, text string) (objects []runtime.Object) {
	t.Helper()
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	documents := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return objects
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(bytes.TrimSpace(document)) == 0 {
			continue
		}
		o, _, err := decoder.Decode(document, nil, nil)
		if err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		objects = append(objects, o)
	}
}

// find returns the only object of a type.
func find[T runtime.Object](t *testing.T, objects []runtime.Object) T {
	t.Helper()
	var found []T
	for _, o := range objects {
		if o, ok := o.(T); ok {
			found = append(found, o)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d objects of type %T", len(found), *new(T))
	}
	return found[0]
}

// Without values, lint logs which are missing, and finds nothing wrong.
func TestLint(t *testing.T) {
	output, flags := log.Writer(), log.Flags()
	defer func() {
		log.SetOutput(output)
		log.SetFlags(flags)
	}()
	log.SetFlags(0)
	for _, test := range []struct {
		values map[string]any
		want   []string
	}{
		{required(nil), nil},
		{nil, []string{
			`WARN missing required values message="apiServer has to be set: the address by which nodes reach it without Services"`,
			`WARN missing required values message="image.repository has to be set: build the image (make image) and push it"`,
			`WARN missing required values message="image.tag or image.digest has to be set"`,
		}},
	} {
		var logged strings.Builder // by package slog, whose default is package log
		log.SetOutput(&logged)
		messages := lint.RunAll(chart, test.values, "kube-system").Messages
		got := slices.Compact(slices.Sorted(strings.Lines(logged.String()))) // for each image
		for i := range got {
			got[i] = strings.TrimSpace(got[i])
		}
		if d := cmp.Diff(test.want, got); d != "" {
			t.Errorf("with %v, lint logs (-want +got):\n%s", test.values, d)
		}
		if len(messages) > 0 {
			t.Errorf("with %v, lint finds %v", test.values, messages)
		}
	}
}

// The icon is a file of this repository, whose address is that of the Go module.
func TestIcon(t *testing.T) {
	c, err := loader.Load(chart)
	if err != nil {
		t.Fatal(err)
	}
	_, file, ok := strings.Cut(c.Metadata.Icon, "/tandem-proxy/tandem/main/")
	if !ok || c.Metadata.Home != "https://github.com/tandem-proxy/tandem" {
		t.Errorf("home %q, icon %q", c.Metadata.Home, c.Metadata.Icon)
	}
	if _, err := os.Stat(filepath.Join("../..", file)); err != nil {
		t.Error(err)
	}
}

// The notes name commands for what was installed.
func TestNotes(t *testing.T) {
	for mode, left := range map[string]string{"ebpf": "programs and rules in", "iptables": "\nrules in", "ipvs": "virtual servers and rules in"} {
		files, err := renderFiles(required(map[string]any{"mode": mode}))
		if err != nil {
			t.Fatal(err)
		}
		notes := files["tandem-kube-proxy/templates/NOTES.txt"]
		if !strings.Contains(notes, "-n kube-system rollout status daemonset tandem-kube-proxy\n") || !strings.Contains(notes, "tandemctl status\n") || !strings.Contains(notes, left) {
			t.Errorf("in mode %s:\n%s", mode, notes)
		}
	}
}

// The kustomization is the chart's mode ebpf; the other modes are files of testdata, which
// package test/image runs as well.
func TestModes(t *testing.T) {
	for mode, file := range map[string]string{
		"ebpf": "../../../deploy/kustomize/base/kube-proxy.yaml", "iptables": "chart-iptables.yaml", "ipvs": "chart-ipvs.yaml",
	} {
		t.Run(mode, func(t *testing.T) {
			text := mustRender(t, map[string]any{"mode": mode, "clusterCIDR": "10.244.0.0/16,fd00:10:244::/48"})
			golden.Compare(t, file, "# SPDX-License-Identifier: Apache-2.0\n# Rendered from the chart; 'go test -C test/deploy . -update' writes it.\n"+text)
			check(t, text, mode)
		})
	}
}

func TestPrivileged(t *testing.T) {
	text := mustRender(t, map[string]any{"privileged": true})
	pod := check(t, text, "ebpf")
	if c := pod.Containers[0].SecurityContext; !*c.Privileged || c.Capabilities != nil || len(pod.InitContainers) > 0 {
		t.Errorf("privileged: %+v, and %d init containers", c, len(pod.InitContainers))
	}
}

// check checks rules that no schema contains, and returns the pods.
func check(t *testing.T, text, mode string) v1.PodSpec {
	t.Helper()
	objects := decode(t, text)
	ds := find[*appsv1.DaemonSet](t, objects)
	selector := labels.SelectorFromSet(ds.Spec.Selector.MatchLabels)
	if !selector.Matches(labels.Set(ds.Spec.Template.Labels)) {
		t.Errorf("the selector %s does not select %v", selector, ds.Spec.Template.Labels)
	}
	pod := ds.Spec.Template.Spec
	volumes := map[string]bool{}
	for _, v := range pod.Volumes {
		volumes[v.Name] = true
	}
	for _, c := range append(slices.Clone(pod.InitContainers), pod.Containers...) {
		for _, m := range c.VolumeMounts {
			if !volumes[m.Name] {
				t.Errorf("container %s mounts %s, which is no volume", c.Name, m.Name)
			}
		}
		for _, p := range c.Ports {
			if p.HostPort != p.ContainerPort {
				t.Errorf("port %d is %d on the host, which the API server refuses with the host's network", p.ContainerPort, p.HostPort)
			}
		}
		s := c.SecurityContext
		if s.AllowPrivilegeEscalation != nil && !*s.AllowPrivilegeEscalation && slices.Contains(s.Capabilities.Add, "SYS_ADMIN") {
			t.Error("the API server refuses SYS_ADMIN without privilege escalation")
		}
	}
	file := filepath.Join(t.TempDir(), "config.conf")
	if err := os.WriteFile(file, []byte(find[*v1.ConfigMap](t, objects).Data["config.conf"]), 0o644); err != nil {
		t.Fatal(err)
	}
	c, warnings, err := config.Load(file)
	if err != nil || len(warnings) > 0 || len(c.Validate()) > 0 {
		t.Errorf("the configuration: %v, warnings %q, invalid %v", err, warnings, c.Validate())
	}
	if string(c.KubeProxy.Mode) != mode {
		t.Errorf("mode %s, want %s", c.KubeProxy.Mode, mode)
	}
	// Probes and the PodMonitor name the ports.
	c.MoveSharedServers()
	listens := map[string]string{"healthz": c.KubeProxy.HealthzBindAddress, "metrics": c.KubeProxy.MetricsBindAddress}
	for _, p := range pod.Containers[0].Ports {
		if address := listens[p.Name]; !strings.HasSuffix(address, fmt.Sprintf(":%d", p.ContainerPort)) {
			t.Errorf("port %s is %d; kube-proxy listens at %q", p.Name, p.ContainerPort, address)
		}
		delete(listens, p.Name)
	}
	if len(listens) > 0 {
		t.Errorf("no port of the container is that of %v", listens)
	}
	return pod
}

// Missing or invalid values are rejected, with their name.
func TestRefused(t *testing.T) {
	for name, values := range map[string]map[string]any{
		"image.repository":           {"apiServer": "https://api-server.example:6443"},
		"apiServer":                  required(map[string]any{"apiServer": ""}),
		"mode":                       required(map[string]any{"mode": "nftables"}),
		"image.tag":                  required(map[string]any{"image": map[string]any{"repository": "x"}}),
		"serviceAccount.name":        required(map[string]any{"serviceAccount": map[string]any{"create": false}}),
		"/apiServer":                 required(map[string]any{"apiServer": "10.0.0.1:6443"}),
		"'hostPid'":                  required(map[string]any{"hostPid": false}),
		"'respository'":              {"image": map[string]any{"respository": "x", "tag": "y"}},
		"/image/digest":              required(map[string]any{"image": map[string]any{"digest": "latest"}}),
		"/capabilities/ebpf":         required(map[string]any{"capabilities": map[string]any{"ebpf": []any{"cap_bpf"}}}),
		"/metricsBindAddress":        required(map[string]any{"metricsBindAddress": "nonsense"}),
		"/config/metricsBindAddress": required(map[string]any{"config": map[string]any{"metricsBindAddress": "999.0.0.1:10249"}}),
		"/config/healthzBindAddress": required(map[string]any{"config": map[string]any{"healthzBindAddress": "0.0.0.0:65536"}}),
		"/clusterCIDR/1":             required(map[string]any{"clusterCIDR": []any{"10.0.0.0/8", "x"}}),
		"/clusterCIDR/0":             required(map[string]any{"clusterCIDR": []any{"10.0.0.0/8,fd00::/8"}}),
		"/clusterCIDR":               required(map[string]any{"clusterCIDR": "fd00::/129"}),
		"metricsBindAddress":         required(map[string]any{"podMonitor": map[string]any{"enabled": true}}),
		"127.0.0.1:9999 is a loopback address": required(map[string]any{
			"podMonitor": map[string]any{"enabled": true}, "metricsBindAddress": "0.0.0.0:10249", "config": map[string]any{"metricsBindAddress": "127.0.0.1:9999"},
		}),
		"[::1]:9999 is a loopback address": required(map[string]any{"podMonitor": map[string]any{"enabled": true}, "metricsBindAddress": "[::1]:9999"}),
	} {
		if _, err := render(values); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("without a good %s: %v", name, err)
		}
	}
}

// Values reach the objects, and own options the second document of the configuration.
func TestValues(t *testing.T) {
	digest := "sha256:" + strings.Repeat("0123456789abcdef", 4)
	text := mustRender(t, map[string]any{
		"config":    map[string]any{"iptables": map[string]any{"masqueradeAll": true}},
		"tandem":    map[string]any{"ebpf": map[string]any{"fallback": []any{"none"}}},
		"extraArgs": []any{"-v=4"}, "hostPID": false, "cgroupRoot": "/sys/fs/cgroup/unified",
		"clusterCIDR": []any{"10.244.0.0/16", "fd00:10:244::/48"},
		"image":       map[string]any{"repository": "registry.example/kube-proxy", "digest": digest},
	})
	pod := check(t, text, "ebpf")
	for _, want := range []string{"masqueradeAll: true", "- none", "cgroupRoot: /host/cgroup", "path: /sys/fs/cgroup/unified", "- -v=4", "clusterCIDR: 10.244.0.0/16,fd00:10:244::/48", "registry.example/kube-proxy@" + digest} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
	if pod.HostPID {
		t.Error("hostPID is set")
	}
	coexistence := map[string]any{"coexistence": map[string]any{"preset": "socket-lb"}}
	for _, more := range []map[string]any{
		{"tandem": coexistence},
		{"metricsBindAddress": "0.0.0.0:9999"},
		{"metricsBindAddress": "[::]:9999"},
		{"metricsBindAddress": "::1"},
		{"metricsBindAddress": nil},
		{"metricsBindAddress": "0.0.0.0:9999", "config": map[string]any{"metricsBindAddress": "127.0.0.1:9998"}},
		{"config": map[string]any{"healthzBindAddress": "[fd00::1025]:9997"}},
		{"config": map[string]any{"healthzBindAddress": "192.0.2.1"}},
		{"podMonitor": map[string]any{"enabled": true}, "config": map[string]any{"metricsBindAddress": "0.0.0.0:9999"}},
		{"config": map[string]any{"healthzBindAddress": "[::]:10256", "metricsBindAddress": "[::1]:9999"}, "tandem": coexistence},
	} {
		check(t, mustRender(t, more), "ebpf")
	}
	// Tools find the pods of kube-proxy by this label; beside another one, they are that one's.
	for want, more := range map[string]map[string]any{
		"kube-proxy": nil,
		"":           {"tandem": coexistence},
		"mine":       {"podLabels": map[string]any{"k8s-app": "mine"}},
		"ours":       {"podLabels": map[string]any{"k8s-app": "ours"}, "tandem": coexistence},
	} {
		if got := find[*appsv1.DaemonSet](t, decode(t, mustRender(t, more))).Spec.Template.Labels["k8s-app"]; got != want {
			t.Errorf("with %v, pods have the label k8s-app: %q, want %q", more, got, want)
		}
	}
}

// An overlay names image and API server.
func TestKustomize(t *testing.T) {
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), "../../deploy/kustomize/example")
	if err != nil {
		t.Fatal(err)
	}
	text, err := built.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	check(t, string(text), "ebpf")
	for _, leftover := range []string{"api-server.example", "registry.example/kube-proxy:unset"} {
		if strings.Contains(string(text), leftover) {
			t.Errorf("%s is left:\n%s", leftover, text)
		}
	}
}
