// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package otherproxy finds kube-proxies that run on this node, by what listens and how it answers: another
// one than this process, at the ports of kube-proxies, and the metrics servers of processes. Rules in the
// kernel prove nothing: they outlive their process.
package otherproxy

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/sockdiag"
)

// Proxy is another kube-proxy.
type Proxy struct {
	// Mode is what it says at /proxyMode; empty if only its health server answers.
	Mode string
	// Server is where it answered.
	Server netip.AddrPort
	// Listeners are the addresses that its servers are bound to. Where two kube-proxies besides this
	// process have health servers, they are of both: such servers do not tell whose they are.
	Listeners []netip.AddrPort
	// Process is its name and id; empty if this process cannot see it, as in a pod without
	// hostPID.
	Process string
}

// String is "mode iptables at 127.0.0.1:10249, process k3s (pid 1234)".
func (p *Proxy) String() string {
	text := "at " + p.Server.String()
	if p.Mode != "" {
		text = "mode " + p.Mode + " " + text
	}
	if p.Process != "" {
		text += ", process " + p.Process
	}
	return text
}

// Finder finds another kube-proxy in the network namespace of this process.
type Finder struct {
	// Ports are those of health and metrics servers.
	Ports []uint16
	// Own is a mode of this proxy alone: what says it is another process of it, which does not
	// count.
	Own string
	// ProcRoot is where processes are found; /proc if empty.
	ProcRoot string
}

// answerLimit is for a busy process on a busy node.
const answerLimit = 2 * time.Second

// ErrSilent means that no kube-proxy answers, but that something at its ports listens and does not answer at all. That may be one: a
// process that is stopped, or gets no CPU, keeps its sockets.
var ErrSilent = errors.New("what listens at a port of kube-proxies does not answer")

// Find returns another kube-proxy; nil if there is none, with ErrSilent if that is not certain. Listeners of this process, and those
// that answer otherwise than a kube-proxy, do not count.
func (f *Finder) Find(ctx context.Context) (*Proxy, error) {
	list, err := f.listeners(ctx)
	if err != nil {
		return nil, err
	}
	answers, silent := askAll(ctx, list)
	// One that says its mode tells most. Health servers alone do not tell whose they are.
	is := func(p *Proxy) bool { return p != nil }
	if slices.ContainsFunc(answers, func(p *Proxy) bool { return p != nil && p.Mode != "" }) {
		is = func(p *Proxy) bool { return p != nil && p.Mode != "" && p.Mode != f.Own }
	}
	at := slices.IndexFunc(answers, is)
	if at < 0 {
		return nil, cmp.Or(ctx.Err(), silent)
	}
	found := answers[at]
	found.Process = f.processOf(list[at].Inode)
	for i, p := range answers {
		if p != nil && (p.Mode == "" || p.Mode != f.Own) {
			found.Listeners = append(found.Listeners, list[i].Local)
		}
	}
	return found, ctx.Err()
}

// askAll returns the kube-proxies that listen at sockets, at the sockets' indexes, with ErrSilent if something does not answer. It asks all
// at once: one that accepts connections and never answers takes its time.
func askAll(ctx context.Context, list []sockdiag.Socket) ([]*Proxy, error) {
	answers, errs := make([]*Proxy, len(list)), make([]error, len(list))
	var wg sync.WaitGroup
	for i, l := range list {
		wg.Go(func() { answers[i], errs[i] = ask(ctx, l.Local) })
	}
	wg.Wait()
	return answers, errors.Join(errs...)
}

// ask returns the kube-proxy that listens there; nil for anything else, with ErrSilent for what does not answer in time.
func ask(ctx context.Context, listener netip.AddrPort) (*Proxy, error) {
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	for _, at := range reachable(listener) {
		var mode string
		var isMetrics, isHealth bool
		var wg sync.WaitGroup
		wg.Go(func() { mode, isMetrics = proxyMode(ctx, at) })
		wg.Go(func() { isHealth = isHealthServer(ctx, at) })
		wg.Wait()
		switch {
		case isMetrics:
			return &Proxy{Mode: mode, Server: at}, nil
		case isHealth:
			return &Proxy{Server: at}, nil
		}
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("%w: %s", ErrSilent, listener)
	}
	return nil, nil
}

// Holder names the process that listens at a port; empty if it is not visible, or none does.
func (f *Finder) Holder(ctx context.Context, port uint16) string {
	list, err := (&Finder{Ports: []uint16{port}, ProcRoot: f.ProcRoot}).listeners(ctx)
	if err != nil {
		return ""
	}
	for _, l := range list {
		if name := f.processOf(l.Inode); name != "" {
			return name
		}
	}
	return ""
}

// MetricsServers are the addresses at which this host reaches metrics servers of kube-proxies, of the processes with a
// name that are visible in this network namespace. It finds those that no default address leads to.
func MetricsServers(ctx context.Context, name string) (found []netip.AddrPort, err error) {
	sockets := map[uint32]bool{}
	for _, p := range processes(defaultProcRoot) {
		if commOf(p) == name {
			maps.Copy(sockets, socketsOf(p))
		}
	}
	if len(sockets) == 0 {
		return nil, nil
	}
	list, err := listeners(ctx, func(s *sockdiag.Socket) bool { return sockets[s.Inode] })
	if err != nil {
		return nil, err
	}
	// Those of healthCheckNodePorts, which may be many, come last.
	slices.SortStableFunc(list, func(a, b sockdiag.Socket) int { return cmp.Compare(a.Local.Port(), b.Local.Port()) })
	answers, _ := askAll(ctx, list) // what is silent cannot be used
	for _, p := range answers {
		if p != nil && p.Mode != "" {
			found = append(found, p.Server)
		}
	}
	return found, nil
}

// listeners are sockets that take TCP connections, IPv4 first.
func listeners(ctx context.Context, keep func(*sockdiag.Socket) bool) (list []sockdiag.Socket, err error) {
	_, _, err = sockdiag.Dump(ctx, sockdiag.Filter{Protocol: unix.IPPROTO_TCP, States: 1 << sockdiag.Listen}, func(s sockdiag.Socket) bool {
		if keep(&s) {
			list = append(list, s)
		}
		return false
	})
	if err != nil {
		return nil, fmt.Errorf("find listening sockets: %w", err)
	}
	return list, nil
}

// listeners are the sockets of other processes at the ports.
func (f *Finder) listeners(ctx context.Context) ([]sockdiag.Socket, error) {
	list, err := listeners(ctx, func(s *sockdiag.Socket) bool { return slices.Contains(f.Ports, s.Local.Port()) })
	if err != nil {
		return nil, err
	}
	// Read afterwards: this process may have begun to listen just before.
	own := socketsOf("/proc/self")
	return slices.DeleteFunc(list, func(s sockdiag.Socket) bool { return own[s.Inode] }), nil
}

// socketsOf are the inodes of a process's sockets.
func socketsOf(process string) map[uint32]bool {
	inodes := map[uint32]bool{}
	files, err := os.ReadDir(process + "/fd")
	if err != nil {
		return inodes
	}
	for _, file := range files {
		link, err := os.Readlink(filepath.Join(process, "fd", file.Name()))
		if err != nil {
			continue // closed by now
		}
		text, ok := strings.CutPrefix(link, "socket:[")
		if n, err := strconv.ParseUint(strings.TrimSuffix(text, "]"), 10, 32); ok && err == nil {
			inodes[uint32(n)] = true
		}
	}
	return inodes
}

// processOf names the process that has a socket.
func (f *Finder) processOf(inode uint32) string {
	for _, p := range processes(cmp.Or(f.ProcRoot, defaultProcRoot)) {
		if !socketsOf(p)[inode] {
			continue
		}
		name := commOf(p)
		if name == "" {
			return ""
		}
		return fmt.Sprintf("%s (pid %s)", name, filepath.Base(p))
	}
	return ""
}

const defaultProcRoot = "/proc"

// processes are the directories of those that are visible.
func processes(procRoot string) []string {
	list, _ := filepath.Glob(filepath.Join(procRoot, "[0-9]*")) // the pattern is well-formed
	return list
}

// commOf is the name of a process; empty if it has ended.
func commOf(process string) string {
	name, _ := os.ReadFile(filepath.Join(process, "comm"))
	return strings.TrimSpace(string(name))
}

// reachable are the addresses by which this host reaches a listener. One at :: may be for both
// families.
func reachable(local netip.AddrPort) []netip.AddrPort {
	v4, v6 := netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()
	switch {
	case !local.Addr().IsUnspecified():
		return []netip.AddrPort{local}
	case local.Addr().Is4():
		return []netip.AddrPort{netip.AddrPortFrom(v4, local.Port())}
	}
	return []netip.AddrPort{netip.AddrPortFrom(v6, local.Port()), netip.AddrPortFrom(v4, local.Port())}
}

var aMode = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)

// proxyMode is what a metrics server answers.
func proxyMode(ctx context.Context, server netip.AddrPort) (mode string, ok bool) {
	body, err := get(ctx, server, "/proxyMode")
	mode = strings.TrimSpace(string(body))
	return mode, err == nil && aMode.MatchString(mode)
}

// isHealthServer recognises a health server by its answer. The status reports whether it is healthy.
func isHealthServer(ctx context.Context, server netip.AddrPort) bool {
	body, err := get(ctx, server, "/healthz")
	if err != nil && !errors.Is(err, errStatus) {
		return false
	}
	var answer struct{ LastUpdated, CurrentTime *string }
	return json.Unmarshal(body, &answer) == nil && answer.LastUpdated != nil && answer.CurrentTime != nil
}

var errStatus = errors.New("another status than 200")

func get(ctx context.Context, server netip.AddrPort, path string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+server.String()+path, nil)
	if err != nil {
		return nil, err
	}
	// Not the default transport, which may use an HTTP proxy.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	const longest = 1 << 10
	body, err := io.ReadAll(io.LimitReader(response.Body, longest))
	if err == nil && response.StatusCode != http.StatusOK {
		err = errStatus
	}
	return body, err
}
