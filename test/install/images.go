// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	build "github.com/tandem-proxy/tandem/test/image"
)

// The names of images: ours as in the documentation.
const (
	ours  = "registry.internal.example/tandem:v1"
	next  = "registry.internal.example/tandem:v2"
	other = "registry.internal.example/tandem:v3" // whose maps have another layout
	tools = "registry.internal.example/tools:v1"  // this program, as server and client
)

// imageOf is the name that kubeadm has for an image.
func (c *cluster) imageOf(what string) string {
	c.tb.Helper()
	all := c.kubeadm("config", "images", "list", "--kubernetes-version="+c.version)
	for line := range strings.Lines(all) {
		name := strings.TrimSpace(line)
		if base, _, _ := strings.Cut(path.Base(name), ":"); base == what {
			return name
		}
	}
	c.tb.Fatalf("kubeadm knows no image of %s, only\n%s", what, all)
	return ""
}

// images are kubeadm's, and ours.
func (c *cluster) images() []image {
	c.tb.Helper()
	pack := func(name string, content map[string]string) layer {
		l, err := newLayer(filepath.Join(c.dir, name+".tar"), content)
		if err != nil {
			c.tb.Fatalf("make an image: %v", err)
		}
		return l
	}
	program := func(name string) map[string]string {
		return map[string]string{"usr/local/bin/" + name: filepath.Join(c.parts, "bin", name)}
	}
	base := pack("base", map[string]string{"": build.RootFS(c.tb, source)})
	programs := func(version string, flags ...string) string {
		dir := filepath.Join(c.dir, "programs-"+version)
		build.Build(c.tb, source, dir, append(flags, "-ldflags=-s -w -X main.version="+version)...)
		return dir
	}
	ofOurs := programs("v1")
	var all []image
	for _, name := range []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "etcd", "coredns", "pause"} {
		all = append(all, image{c.imageOf(name), []string{"/usr/local/bin/" + name}, []layer{pack(name, program(name))}})
	}
	wrapper := pack("wrapper", map[string]string{"usr/local/bin/iptables-wrapper": filepath.Join(ofOurs, "iptables-wrapper")})
	all = append(all, image{c.imageOf("kube-proxy"), []string{"/usr/local/bin/kube-proxy"}, []layer{base, wrapper, pack("kube-proxy", program("kube-proxy"))}})
	for name, dir := range map[string]string{ours: ofOurs, next: programs("v2"), other: programs("v3", "-overlay="+c.otherLayout())} {
		all = append(all, image{name, []string{"/usr/local/bin/kube-proxy"}, []layer{base, pack(strings.ReplaceAll(path.Base(name), ":", "-"), map[string]string{"usr/local/bin": dir})}})
	}
	self, err := os.Executable()
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	all = append(all, image{tools, []string{"/client"}, []layer{pack("tools", map[string]string{"client": self})}})
	return all
}

// otherLayout has go build take another version of the maps' layout.
func (c *cluster) otherLayout() (overlay string) {
	c.tb.Helper()
	const file = source + "/proxier/ebpf/lbmap/enums.go"
	path, err := filepath.Abs(file)
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	changed := regexp.MustCompile(`LayoutVersion = \d+`).ReplaceAll(text, []byte("LayoutVersion = 1000"))
	if bytes.Equal(changed, text) {
		c.tb.Fatalf("%s has no LayoutVersion", file)
	}
	replacement, overlay := filepath.Join(c.dir, "enums.go"), filepath.Join(c.dir, "overlay.json")
	replace, err := json.Marshal(map[string]any{"Replace": map[string]string{path: replacement}})
	if err == nil {
		err = errors.Join(os.WriteFile(replacement, changed, 0o644), os.WriteFile(overlay, replace, 0o644))
	}
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	return overlay
}

// load imports images.
func (c *cluster) load(n *node, images []image) {
	c.tb.Helper()
	began := time.Now()
	cmd, err := n.within(c.tb.Context(), "ctr", "-n", "k8s.io", "images", "import", "-")
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	in, out := io.Pipe()
	cmd.Stdin = in
	go func() { out.CloseWithError(save(out, images...)) }()
	if said, err := cmd.CombinedOutput(); err != nil {
		c.tb.Fatalf("import images: %v\n%s", err, said)
	}
	c.tb.Logf("images on %s took %v", n.Name, time.Since(began).Round(time.Second))
}
