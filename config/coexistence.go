// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net"
	"slices"
	"strconv"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/tandem-proxy/tandem/proxier"
)

// CoexistenceConfiguration says what this proxy serves on a node where another kube-proxy stays
// and serves the rest. If nothing is set, this proxy serves everything.
type CoexistenceConfiguration struct {
	// Preset is a common choice: CoexistSocketLB or CoexistNorthSouth. Frontends and Clients
	// narrow it.
	Preset string `json:"preset,omitempty"`
	// Frontends are the kinds of frontends to serve, by their names in proxier; empty for all.
	Frontends []string `json:"frontends,omitempty"`
	// Clients are those to serve: CoexistPods, CoexistHost, CoexistExternal. Empty for those of
	// the preset, or all without one.
	Clients []string `json:"clients,omitempty"`
}

// Presets of CoexistenceConfiguration.
const (
	CoexistSocketLB   = "socket-lb"   // connections of this node's sockets
	CoexistNorthSouth = "north-south" // packets of clients outside this node
)

// Clients of CoexistenceConfiguration.
const (
	CoexistPods     = "pods"     // of this node
	CoexistHost     = "host"     // processes in the network namespace of this node
	CoexistExternal = "external" // that come in by an uplink
)

var (
	coexistPresets = map[string][]string{
		CoexistSocketLB: {CoexistPods, CoexistHost}, CoexistNorthSouth: {CoexistExternal},
	}
	// coexistClients are in the order of proxier's origins.
	coexistClients = []string{CoexistPods, CoexistHost, CoexistExternal}
)

// Ports of the two HTTP servers beside another kube-proxy, which has the usual ones.
const (
	SharedHealthzPort = 10356
	SharedMetricsPort = 10349
)

// Enabled says that another kube-proxy stays on this node.
func (c *CoexistenceConfiguration) Enabled() bool {
	return c.Preset != "" || len(c.Frontends) > 0 || len(c.Clients) > 0
}

// Share is what this proxy serves. The configuration has been validated.
func (c *CoexistenceConfiguration) Share() (share proxier.Share) {
	for _, k := range proxier.Kinds() {
		name := k.String()
		if k == proxier.HostIP { // a hostPort as well
			name = proxier.HostPort.String()
		}
		share.Kinds[k] = len(c.Frontends) == 0 || slices.Contains(c.Frontends, name)
	}
	clients := c.Clients
	if len(clients) == 0 {
		clients = coexistPresets[c.Preset]
	}
	for o, name := range coexistClients {
		share.Clients[o] = len(clients) == 0 || slices.Contains(clients, name)
	}
	return share
}

// MoveSharedServers moves the servers from upstream's ports to others, if another kube-proxy stays
// on this node. An address with another port is left alone.
func (c *Config) MoveSharedServers() {
	if !c.Tandem.Coexistence.Enabled() {
		return
	}
	for _, server := range []struct {
		address  *string
		from, to int
	}{
		{&c.KubeProxy.HealthzBindAddress, HealthzPort, SharedHealthzPort},
		{&c.KubeProxy.MetricsBindAddress, MetricsPort, SharedMetricsPort},
	} {
		if host, port, err := net.SplitHostPort(*server.address); err == nil && port == strconv.Itoa(server.from) {
			*server.address = net.JoinHostPort(host, strconv.Itoa(server.to))
		}
	}
}

func (c *Config) validateCoexistence() (all field.ErrorList) {
	x, e, at := &c.Tandem.Coexistence, &c.Tandem.EBPF, field.NewPath(TandemKind, "coexistence")
	if !x.Enabled() {
		return nil
	}
	kinds := make([]string, 0, len(proxier.Kinds()))
	for _, k := range proxier.Kinds() {
		if k != proxier.HostIP {
			kinds = append(kinds, k.String())
		}
	}
	within, known := coexistPresets[x.Preset]
	if !known && x.Preset != "" {
		all = append(all, field.NotSupported(at.Child("preset"), x.Preset, []string{CoexistSocketLB, CoexistNorthSouth}))
	}
	for _, list := range []struct {
		name          string
		given, choice []string
	}{{"frontends", x.Frontends, kinds}, {"clients", x.Clients, coexistClients}} {
		for i, text := range list.given {
			switch at := at.Child(list.name).Index(i); {
			case !slices.Contains(list.choice, text):
				all = append(all, field.NotSupported(at, text, list.choice))
			case slices.Contains(list.given[:i], text):
				all = append(all, field.Duplicate(at, text))
			case known && list.name == "clients" && !slices.Contains(within, text):
				all = append(all, field.Invalid(at, text, fmt.Sprintf("preset %s does not serve these clients", x.Preset)))
			}
		}
	}
	// What the two proxies would otherwise both serve, or neither.
	set := at.Child("preset")
	switch {
	case x.Preset != "":
	case len(x.Frontends) > 0:
		set = at.Child("frontends")
	default:
		set = at.Child("clients")
	}
	if mode := string(c.KubeProxy.Mode); mode != ModeEBPF {
		all = append(all, field.Invalid(set, x.text(), fmt.Sprintf("needs mode ebpf, but the mode is %s: only eBPF programs can serve a part of the traffic while another kube-proxy serves the rest (--proxy-mode=ebpf sets the mode)", mode)))
	}
	if c.Origin(TandemKind+".ebpf.fallback") != "" && !slices.Equal(e.Fallback, []string{FallbackNone}) && len(e.Fallback) > 0 {
		all = append(all, field.Invalid(field.NewPath(TandemKind, "ebpf", "fallback"), e.Fallback, "must be none or unset with coexistence: the other kube-proxy serves what programs cannot"))
	}
	clients := x.Share().Clients
	if e.SocketLB == SocketLBHost && clients[proxier.FromPod] {
		all = append(all, field.Invalid(field.NewPath(TandemKind, "ebpf", "socketLB"), e.SocketLB, "excludes pods, which coexistence.clients includes"))
	}
	if len(e.PodDevices) > 0 && !(clients[proxier.FromPod] && clients[proxier.FromOutside]) {
		all = append(all, field.Invalid(field.NewPath(TandemKind, "ebpf", "podDevices"), e.PodDevices, "needs the clients pods and external in coexistence"))
	}
	return all
}

// text is what errors show.
func (c *CoexistenceConfiguration) text() any {
	switch {
	case c.Preset != "":
		return c.Preset
	case len(c.Frontends) > 0:
		return c.Frontends
	}
	return c.Clients
}
