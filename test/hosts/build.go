// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strings"

	"github.com/tandem-proxy/tandem/test/lab"
)

// World is a profile in network namespaces.
type World struct {
	*Profile
	Lab         *lab.Lab
	Node, Other *lab.Node
	// Here and There are servers on the two nodes, Pod is a client on Node.
	Here, There, Pod *lab.Pod
	// Outsiders are the clients outside the cluster, by name.
	Outsiders map[string]*lab.Client

	dir  string // for files
	open []io.Closer
}

// Close ends what Build opened itself; the lab ends the rest.
func (w *World) Close() error {
	var errs []error
	for _, c := range w.open {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// Build makes a profile in a lab that is otherwise empty, made with its LabOptions. The servers
// listen already. The directory is for files, and has to be empty.
func (p *Profile) Build(ctx context.Context, l *lab.Lab, dir string) (*World, error) {
	w := &World{Profile: p, Lab: l, Outsiders: map[string]*lab.Client{}, dir: dir}
	for _, step := range []func(context.Context) error{w.machines, w.wires, w.configure, w.daemons, w.attach, w.attachForeign, w.serve} {
		if err := step(ctx); err != nil {
			return nil, errors.Join(fmt.Errorf("build profile %s: %w", p.Name, err), w.Close())
		}
	}
	return w, nil
}

// Available returns nil if the profile can be built here, or what is missing.
func (p *Profile) Available(ctx context.Context, l *lab.Lab) error {
	if _, err := exec.LookPath("go"); err != nil && p.Pods.CNI != "" {
		return fmt.Errorf("build plugins: %w", err)
	}
	for _, tool := range p.Tools {
		if _, err := exec.LookPath(tool); err != nil {
			return err
		}
	}
	for _, kind := range p.Kinds {
		// With parameters that no kind accepts, so that nothing is created.
		out, err := l.Fabric().Command(ctx, "ip", "link", "add", "probe", "link", "br0", "mtu", "1", "type", kind).CombinedOutput()
		if err != nil && (bytes.Contains(out, []byte("Unknown device type")) || bytes.Contains(out, []byte("not supported"))) {
			return fmt.Errorf("this kernel has no devices of type %s", kind)
		}
	}
	return nil
}

// LabOptions are those of the profile's lab.
func (p *Profile) LabOptions() lab.Options {
	return lab.Options{MTU: p.MTU, Unattached: p.Unattached, Pause: p.OptedOut} // with processes in the pods
}

func (w *World) machines(context.Context) (err error) {
	add := func(to **lab.Node, name string) {
		if err == nil {
			*to, err = w.Lab.AddNode(name)
		}
	}
	addPod := func(to **lab.Pod, n *lab.Node, name string) {
		if err == nil {
			*to, err = n.AddPod(name)
		}
	}
	add(&w.Node, "node")
	add(&w.Other, "other")
	addPod(&w.Here, w.Node, Here)
	addPod(&w.Pod, w.Node, FromPod)
	addPod(&w.There, w.Other, There)
	for _, name := range w.clients()[2:] {
		if err == nil {
			w.Outsiders[name], err = w.Lab.AddClient(name)
		}
	}
	for i, pod := range w.pods() {
		for _, f := range w.families() {
			if format, ok := w.PodAddresses[f]; ok && err == nil {
				*map[Family]*netip.Addr{IPv4: &pod.Addr4, IPv6: &pod.Addr6}[f], err = netip.ParseAddr(fmt.Sprintf(format, i+1))
			}
		}
	}
	if err == nil {
		err = errors.Join(w.Lab.Announce(lab.ExternalPrefix4, w.Node), w.Lab.Announce(lab.ExternalPrefix6, w.Node))
	}
	return err
}

func (w *World) machine(name Machine) *lab.Sandbox {
	switch name {
	case "fabric":
		return w.Lab.Fabric()
	case "node":
		return w.Node.Sandbox
	case "other":
		return w.Other.Sandbox
	case FromPod:
		return w.Pod.Sandbox
	}
	return w.Outsiders[string(name)].Sandbox
}

func (w *World) wires(context.Context) error {
	for _, wire := range w.Wires {
		if err := lab.Connect(w.machine(wire.A), wire.DeviceA, w.machine(wire.B), wire.DeviceB, cmp.Or(w.MTU, 1500)); err != nil {
			return err
		}
	}
	for _, t := range w.Tunnels {
		if err := lab.Tunnel(w.machine(t.A), t.DeviceA, w.machine(t.B), t.DeviceB); err != nil {
			return err
		}
	}
	return nil
}

func (w *World) configure(ctx context.Context) error {
	err := errors.Join(
		w.apply(ctx, w.Lab.Fabric(), w.Fabric, w.Node, nil),
		w.apply(ctx, w.Node.Sandbox, w.Profile.Node, w.Node, nil),
		w.apply(ctx, w.Other.Sandbox, w.Profile.Other, w.Other, nil))
	for name, c := range w.Profile.Clients {
		err = errors.Join(err, w.apply(ctx, w.Outsiders[name].Sandbox, c.Setup, w.Node, nil))
	}
	return err
}

func (w *World) daemons(ctx context.Context) error {
	if w.Daemons == nil {
		return nil
	}
	return w.Daemons(ctx, w)
}

func (w *World) pods() []*lab.Pod { return []*lab.Pod{w.Here, w.Pod, w.There} }

func (w *World) attach(ctx context.Context) error {
	if w.Pods.CNI != "" {
		if err := buildPlugins(ctx, w.dir); err != nil {
			return err
		}
	}
	for _, pod := range w.pods() {
		if w.Pods.CNI != "" {
			if err := w.plug(ctx, pod); err != nil {
				return err
			}
		}
		if err := w.apply(ctx, pod.Node.Sandbox, w.Pods.Node, pod.Node, pod); err != nil {
			return err
		}
		if err := w.apply(ctx, pod.Sandbox, w.Pods.Pod, pod.Node, pod); err != nil {
			return err
		}
		if w.PodMTU > 0 && !w.Unattached {
			if err := pod.SetMTU(w.PodMTU); err != nil {
				return err
			}
		}
	}
	return w.apply(ctx, w.Pod.Sandbox, w.ClientPod, w.Node, w.Pod)
}

// Ports of the servers in the pods.
const (
	requestPort  = 8080
	transferPort = 8081
)

func (w *World) serve(context.Context) error {
	for _, pod := range []*lab.Pod{w.Here, w.There} {
		if err := serve(pod.Sandbox, requestPort, transferPort); err != nil {
			return err
		}
	}
	switch {
	case w.ForwardMark != 0:
		if err := w.forward(w.Pod, w.SidecarPort); err != nil {
			return err
		}
	case w.SidecarPort > 0:
		if _, err := w.Pod.ServeTCP(w.SidecarPort); err != nil {
			return err
		}
	}
	if w.NodeServes {
		return serve(w.Node.Sandbox, servicePort, servicePort+1)
	}
	return nil
}

func serve(s *lab.Sandbox, requests, transfers uint16) error {
	for port, start := range map[uint16][]func(uint16) (*lab.Server, error){
		requests: {s.ServeTCP, s.ServeUDP}, transfers: {s.ServeBulk, s.ServeEcho},
	} {
		for _, start := range start {
			if _, err := start(port); err != nil {
				return err
			}
		}
	}
	return nil
}

// apply configures a machine of a node, for a pod if there is one.
func (w *World) apply(ctx context.Context, s *lab.Sandbox, setup Setup, n *lab.Node, pod *lab.Pod) error {
	if err := sysctls(s, setup.Sysctls); err != nil {
		return err
	}
	at := place{node: n, pod: pod}
	if err := w.command(ctx, s, setup.IP, at, "ip", "-batch", "-"); err != nil {
		return err
	}
	for _, f := range w.families() {
		here := place{f, n, pod}
		if err := w.command(ctx, s, setup.Each, here, "ip", "-"+string(f), "-batch", "-"); err != nil {
			return err
		}
		restore := "iptables-restore"
		if f == IPv6 {
			restore = "ip6tables-restore"
		}
		if err := w.command(ctx, s, setup.Rules, here, restore, "--noflush"); err != nil {
			return err
		}
	}
	if err := sysctls(s, setup.Late); err != nil {
		return err
	}
	if err := w.command(ctx, s, setup.Rules4, place{IPv4, n, pod}, "iptables-restore", "--noflush"); err != nil {
		return err
	}
	if err := w.command(ctx, s, setup.WireGuard, at, "wg", "setconf", "wg0", "/dev/stdin"); err != nil {
		return err
	}
	return w.command(ctx, s, setup.NFT, at, "nft", "-f", "-")
}

// command gives a command its input, unless that is empty.
func (w *World) command(ctx context.Context, s *lab.Sandbox, input string, p place, name string, args ...string) error {
	if input == "" {
		return nil
	}
	input, err := w.fill(strings.ReplaceAll(input, "\t", " "), p)
	if err != nil {
		return err
	}
	c := s.Command(ctx, name, args...)
	c.Stdin = strings.NewReader(input)
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%s on %s: %w\n%s\n%s", name, s.Name, err, bytes.TrimSpace(out), input)
	}
	return nil
}

func sysctls(s *lab.Sandbox, lines []string) error {
	for _, line := range lines {
		name, value, _ := strings.Cut(line, "=")
		path := "/proc/sys/" + strings.ReplaceAll(name, ".", "/")
		if err := s.Do(func() error { return os.WriteFile(path, []byte(value), 0) }); err != nil {
			return fmt.Errorf("set sysctl %s on %s: %w", name, s.Name, err)
		}
	}
	return nil
}
