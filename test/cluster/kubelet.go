// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	v1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/volume/util"

	"github.com/tandem-proxy/tandem/test/container"
	"github.com/tandem-proxy/tandem/test/lab"
)

// host has the directories that each node has separately: /run, and kubelet's.
type host struct {
	node *lab.Node
	dir  string
	pod  *v1.PodSpec // of kube-proxy
	// tools is a directory of programs that precede those of the image in the PATH.
	tools string
}

func newHost(node *lab.Node, dir string) (*host, error) {
	h := &host{node: node, dir: dir}
	for _, name := range []string{"run", "config", "token", "modules", "root"} {
		if err := os.MkdirAll(h.path(name), 0o755); err != nil {
			return nil, err
		}
	}
	return h, os.WriteFile(h.path("run/xtables.lock"), nil, 0o600) // FileOrCreate
}

func (h *host) path(name string) string { return filepath.Join(h.dir, name) }

// project writes files into a volume as kubelet does: all of them change atomically, by
// replacing a symbolic link.
func (h *host) project(volume string, files map[string]string) error {
	w, err := util.NewAtomicWriter(h.path(volume), volume)
	if err != nil {
		return err
	}
	payload := map[string]util.FileProjection{}
	for name, text := range files {
		payload[name] = util.FileProjection{Data: []byte(text), Mode: 0o644}
	}
	return w.Write(payload, nil)
}

// container returns a container with the Pod's mounts, and the default one of every Pod. Its
// image is this machine's file system, with a binary in place of the Pod's.
func (h *host) container(binary string) (c container.Container, err error) {
	spec := &h.pod.Containers[0]
	if c, err = container.Of(h.pod, spec, h.node, h.path("token"), h.source); err != nil {
		return c, err
	}
	if c.Dir, err = os.MkdirTemp(h.path("root"), ""); err != nil {
		return c, err
	}
	c.Layers = []string{"/"}
	image := []container.Mount{{To: "/run"}, {To: "/tmp"}, {From: binary, To: c.Args[0], ReadOnly: true}}
	if h.tools != "" {
		image = append(image, container.Mount{From: h.tools, To: "/usr/local/sbin", ReadOnly: true})
	}
	c.Mounts = append(image, c.Mounts...)
	return c, nil
}

// source returns the path of a volume on the host.
func (h *host) source(v *v1.Volume) (string, error) {
	switch {
	case v.ConfigMap != nil:
		return h.path("config"), nil
	case v.HostPath != nil && v.HostPath.Path == "/run/xtables.lock":
		return h.path("run/xtables.lock"), nil
	case v.HostPath != nil && v.HostPath.Path == "/lib/modules":
		return h.path("modules"), nil // tests do not load any
	}
	return "", fmt.Errorf("kubeadm's Pod has an unknown volume %s", v.Name)
}

// sync reads the specification of the node's kube-proxy from the API.
func (h *host) sync(ctx context.Context, p *controlPlane) error {
	configuration, token, err := volumes(ctx, p)
	if err != nil {
		return err
	}
	if err := h.project("config", configuration); err != nil {
		return err
	}
	if err := h.project("token", token); err != nil {
		return err
	}
	h.pod, err = proxyPod(ctx, p.client)
	return err
}

// proxy prepares kube-proxy's container as of the last sync, with a binary in place of its
// image's and flags behind those of the DaemonSet.
func (h *host) proxy(binary string, flags ...string) (*lab.Cmd, error) {
	c, err := h.container(binary)
	if err != nil {
		return nil, err
	}
	c.Args = append(c.Args, flags...)
	return c.Command(context.Background(), h.node)
}
