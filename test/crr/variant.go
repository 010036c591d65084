// SPDX-License-Identifier: Apache-2.0

//go:build linux

package crr

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"

	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// Variant is something to compare.
type Variant interface {
	Name() string
	// Prepare gets a cluster ready. What it starts and leaves behind must not use
	// the CPU afterwards.
	Prepare(ctx context.Context, c *Cluster) error
	// Targets are the addresses that clients dial on a path; none if the variant does
	// not support it.
	Targets(c *Cluster, p Path) []netip.AddrPort
}

// Direct dials the pods themselves, on nodes without any proxy.
type Direct struct{}

// Name of the variant.
func (Direct) Name() string { return "direct" }

// Prepare does nothing.
func (Direct) Prepare(context.Context, *Cluster) error { return nil }

// Targets is the pod.
func (Direct) Targets(c *Cluster, p Path) []netip.AddrPort { return []netip.AddrPort{c.Server(p)} }

// Proxy is a kube-proxy, upstream's or one that is started like it.
type Proxy struct {
	Binary, Mode string
	// Title is its name, the mode if empty.
	Title string
	// Args are its flags on a node, Env its variables; may be nil.
	Args func(*lab.Node) []string
	Env  []string
	// Ready waits for what Start does not; nil for nothing.
	Ready func(context.Context, *lab.Node) error
}

// Name is the title, or the mode.
func (v *Proxy) Name() string { return cmp.Or(v.Title, v.Mode) }

// Prepare programs all nodes. It stops the processes then, so that their periodic syncs do
// not use CPU time during a slice. The kernel state works without them.
func (v *Proxy) Prepare(ctx context.Context, c *Cluster) (err error) {
	objects := slices.Clone(c.Objects)
	for _, n := range c.Nodes {
		objects = append(objects, upstream.NodeObject(n))
	}
	for _, n := range c.Nodes {
		opts := upstream.Options{Binary: v.Binary, Mode: v.Mode, Objects: objects, Env: v.Env}
		if v.Args != nil {
			opts.Args = v.Args(n)
		}
		p, err := upstream.Start(ctx, n, opts)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, p.Close()) }()
	}
	if v.Ready == nil {
		return nil
	}
	for _, n := range c.Nodes {
		if err := v.Ready(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

// Targets are the addresses of Services.
func (v *Proxy) Targets(c *Cluster, p Path) []netip.AddrPort {
	return c.Services(p)
}

// Upstream is upstream's kube-proxy in one of its modes.
func Upstream(binary, mode string) *Proxy {
	return &Proxy{Binary: binary, Mode: mode, Args: func(*lab.Node) []string { return upstream.Flags }}
}
