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
	"runtime"
	"strings"
	"time"

	"github.com/tandem-proxy/tandem/deploy/image"
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

// layer makes one of files and directories, by their names in the image.
func (c *cluster) layer(name string, content map[string]string) image.Layer {
	c.tb.Helper()
	l, err := image.NewLayer(filepath.Join(c.dir, name+".tar"), content, time.Unix(0, 0), false)
	if err != nil {
		c.tb.Fatalf("make an image: %v", err)
	}
	return l
}

// named is an image of this platform.
func named(name string, entrypoint []string, layers ...image.Layer) image.Named {
	return image.Named{Name: name, Images: []image.Image{{Arch: runtime.GOARCH, Entrypoint: entrypoint, Layers: layers}}}
}

// images are kubeadm's, and ours.
func (c *cluster) images() []image.Named {
	c.tb.Helper()
	program := func(name string) map[string]string {
		return map[string]string{"usr/local/bin/" + name: filepath.Join(c.parts, "bin", name)}
	}
	base := c.layer("base", map[string]string{"": build.RootFS(c.tb, source)})
	programs := func(version string, flags ...string) string {
		dir := filepath.Join(c.dir, "programs-"+version)
		build.Build(c.tb, source, dir, append(flags, "-ldflags=-s -w -X main.version="+version)...)
		return dir
	}
	ofOurs := programs("v1")
	var all []image.Named
	add := func(name, entrypoint string, layers ...image.Layer) {
		all = append(all, named(name, []string{entrypoint}, layers...))
	}
	for _, name := range []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "etcd", "coredns", "pause"} {
		add(c.imageOf(name), "/usr/local/bin/"+name, c.layer(name, program(name)))
	}
	wrapper := c.layer("wrapper", map[string]string{"usr/local/bin/iptables-wrapper": filepath.Join(ofOurs, "iptables-wrapper")})
	add(c.imageOf("kube-proxy"), "/usr/local/bin/kube-proxy", base, wrapper, c.layer("kube-proxy", program("kube-proxy")))
	for name, dir := range map[string]string{ours: ofOurs, next: programs("v2"), other: programs("v3", "-overlay="+c.otherLayout())} {
		add(name, "/usr/local/bin/kube-proxy", base, c.layer(strings.ReplaceAll(path.Base(name), ":", "-"), map[string]string{image.Programs: dir}))
	}
	self, err := os.Executable()
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	add(tools, "/client", c.layer("tools", map[string]string{"client": self}))
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
func (c *cluster) load(n *node, images []image.Named) {
	c.tb.Helper()
	began := time.Now()
	cmd, err := n.within(c.tb.Context(), "ctr", "-n", "k8s.io", "images", "import", "-")
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	in, out := io.Pipe()
	cmd.Stdin = in
	go func() {
		_, err := image.Save(out, images...)
		out.CloseWithError(err)
	}()
	if said, err := cmd.CombinedOutput(); err != nil {
		c.tb.Fatalf("import images: %v\n%s", err, said)
	}
	c.tb.Logf("images on %s took %v", n.Name, time.Since(began).Round(time.Second))
}
