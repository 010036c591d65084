// SPDX-License-Identifier: Apache-2.0

//go:build linux

package container_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/test/container"
	"github.com/tandem-proxy/tandem/test/lab"
)

func TestMain(m *testing.M) {
	container.Main()
	lab.Main()
	os.Exit(m.Run())
}

// look prints what a container sees and may do.
const look = `
may() { if (eval "$2") 2>/dev/null; then echo "it may $1"; else echo "it may not $1"; fi; }
[ $$ = 1 ] && echo "its processes are its own" || echo "it sees all processes"
may "write to its root" ': >/file'
may "change settings of the kernel" ': >/proc/sys/net/ipv4/ip_forward'
may "change devices" ': >/sys/class/net/lo/mtu'
may "write to one mount" ': >/through/writable/file'
may "write to another" ': >/given/word'
may "make devices" 'mknod /empty/null c 1 3'
echo "capabilities $(sed -n 's/^CapBnd:.//p' /proc/self/status)"
echo "devices $(echo $(ls /sys/class/net))"
[ -e /sys/fs/cgroup/cgroup.threads ] && echo "the node's cgroups" || echo "$(ls /sys/fs/cgroup | wc -l) cgroups"
echo "$(cat /given/word) in $(cat /layer), $(ls -A /empty | wc -l) files in what is empty"
echo "old root: $(ls -Ad /.node 2>/dev/null), mounts of it: $(grep -c cgroup2 /proc/self/mounts)"
echo "$WORD by $PATH"
`

// tools are those of this machine, which a shell needs.
func tools(t *testing.T) (list []container.Mount) {
	t.Helper()
	for _, dir := range []string{"/usr", "/bin", "/lib", "/lib64"} {
		if _, err := os.Stat(dir); err == nil {
			list = append(list, container.Mount{From: dir, To: dir, ReadOnly: true})
		}
	}
	return list
}

// TestContainer: two containers at both ends of what there is see and may do what they
// should, and leave nothing on the node.
func TestContainer(t *testing.T) {
	n := lab.NewT(t).Node("node1")
	dir := t.TempDir()
	// A mount at /through is to be in the image, and not where the node's name leads.
	name := filepath.Base(dir) + "-of-the-image"
	for path, text := range map[string]string{
		"upper/layer": "the upper layer", "upper" + "/" + name + "/.keep": "", "lower/layer": "the lower layer", "word": "a word", "writable/.keep": "",
	} {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for from, to := range map[string]string{"upper/through": "/" + name, "link": dir} {
		if err := os.Symlink(to, filepath.Join(dir, from)); err != nil {
			t.Fatal(err)
		}
	}
	own, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, all, _ := strings.Cut(string(own), "CapBnd:\t")
	all, _, _ = strings.Cut(all, "\n")

	const path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	for _, tt := range []struct {
		name string
		c    container.Container
		want string
	}{
		{"privileged", container.Container{Privileged: true}, `its processes are its own
it may write to its root
it may change settings of the kernel
it may change devices
it may write to one mount
it may not write to another
it may make devices
capabilities ` + all + `
devices eth0 lo
the node's cgroups
a word in the upper layer, 1 files in what is empty
old root: , mounts of it: 1
a variable by ` + path + "\n"},
		{"least", container.Container{ReadOnly: true, HostPID: true, Capabilities: []string{"NET_ADMIN"}}, `it sees all processes
it may not write to its root
it may not change settings of the kernel
it may not change devices
it may write to one mount
it may not write to another
it may not make devices
capabilities 0000000000001000
devices eth0 lo
0 cgroups
a word in the upper layer, 0 files in what is empty
old root: , mounts of it: 0
a variable by ` + path + "\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.c.Layers, tt.c.Dir = []string{filepath.Join(dir, "upper"), filepath.Join(dir, "lower")}, t.TempDir()
			tt.c.Args, tt.c.Env = []string{"/bin/sh", "-c", look}, []string{"WORD=a variable"}
			tt.c.Mounts = append(tools(t), []container.Mount{
				{To: "/empty"}, {From: filepath.Join(dir, "link", "writable"), To: "/through/writable"},
				{From: filepath.Join(dir, "word"), To: "/given/word", ReadOnly: true},
			}...)
			p, err := tt.c.Command(context.Background(), n)
			if err != nil {
				t.Fatal(err)
			}
			out, err := p.CombinedOutput()
			if d := cmp.Diff(tt.want, string(out)); d != "" || err != nil {
				t.Errorf("error %v, (-want +got):\n%s", err, d)
			}
			if left, err := os.ReadDir(tt.c.Dir); err != nil || len(left) > 0 {
				t.Errorf("left in the directory: %v, error %v", left, err)
			}
		})
	}
	if _, err := os.Stat(filepath.Join(dir, "writable/file")); err != nil {
		t.Errorf("what was written to the node: %v", err)
	}
	for _, path := range []string{"/" + name, "/file", "/given", "/empty"} {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s is on the node", path)
		}
	}
}

// TestContainerFails: it is told what cannot be had.
func TestContainerFails(t *testing.T) {
	n := lab.NewT(t).Node("node1")
	for want, c := range map[string]container.Container{
		"start container: lstat /nowhere: no such file":    {Mounts: []container.Mount{{From: "/nowhere", To: "/somewhere"}}},
		"start container: run /nowhere: no such file":      {Args: []string{"/nowhere"}},
		"start container: capability SWIM is unknown here": {Capabilities: []string{"SWIM"}},
		"start container: mount overlay at /":              {Layers: []string{"/nowhere"}},
	} {
		if c.Args == nil {
			c.Args = []string{"/bin/true"}
		}
		if c.Layers == nil {
			c.Layers = []string{t.TempDir()}
		}
		c.Mounts = append(c.Mounts, tools(t)...)
		c.Dir = t.TempDir()
		p, err := c.Command(context.Background(), n)
		if err != nil {
			t.Fatal(err)
		}
		if out, err := p.CombinedOutput(); err == nil || !strings.HasPrefix(string(out), want) {
			t.Errorf("it says %s, error %v, want %s", out, err, want)
		}
	}
}

// TestOf compares a container with what its pod says.
func TestOf(t *testing.T) {
	n := lab.NewT(t).Node("node1")
	pod := v1.PodSpec{
		HostNetwork: true, HostPID: true,
		Volumes: []v1.Volume{{Name: "a", VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: "/a"}}}, {Name: "b"}},
		Containers: []v1.Container{{
			Name: "c", Command: []string{"/bin/c", "--node=$(NODE)"}, Args: []string{"--word=$(WORD)$(OTHER)"},
			Env: []v1.EnvVar{
				{Name: "NODE", ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: "spec.nodeName"}}}, {Name: "WORD", Value: "w"},
			},
			SecurityContext: &v1.SecurityContext{ReadOnlyRootFilesystem: ptr.To(true), Capabilities: &v1.Capabilities{Add: []v1.Capability{"NET_ADMIN"}}},
			VolumeMounts:    []v1.VolumeMount{{Name: "a", MountPath: "/in/a", ReadOnly: true}},
		}},
	}
	source := func(v *v1.Volume) (string, error) {
		if v.HostPath == nil {
			return "", errors.New("no such thing")
		}
		return "/of/the/node" + v.HostPath.Path, nil
	}
	got, err := container.Of(&pod, &pod.Containers[0], n, "/account", source)
	want := container.Container{
		Args: []string{"/bin/c", "--node=node1", "--word=w$(OTHER)"}, Env: []string{"NODE=node1", "WORD=w"}, HostPID: true, ReadOnly: true,
		Capabilities: []string{"NET_ADMIN"}, Mounts: []container.Mount{{"/account", container.ServiceAccount, true}, {"/of/the/node/a", "/in/a", true}},
	}
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Errorf("error %v, (-want +got):\n%s", err, d)
	}

	for want, spoil := range map[string]func(*v1.PodSpec, *v1.Container){
		"a network of its own": func(pod *v1.PodSpec, _ *v1.Container) { pod.HostNetwork = false },
		"no volume z":          func(_ *v1.PodSpec, c *v1.Container) { c.VolumeMounts[0].Name = "z" },
		"no such thing":        func(_ *v1.PodSpec, c *v1.Container) { c.VolumeMounts[0].Name = "b" },
		"variable NODE":        func(_ *v1.PodSpec, c *v1.Container) { c.Env[0].ValueFrom.FieldRef.FieldPath = "status.podIP" },
	} {
		bad := pod.DeepCopy()
		spoil(bad, &bad.Containers[0])
		if _, err := container.Of(bad, &bad.Containers[0], n, "/account", source); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %s", err, want)
		}
	}
}
