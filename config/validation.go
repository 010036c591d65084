// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation/field"
	utilversion "k8s.io/apimachinery/pkg/util/version"
	"k8s.io/component-base/version"
	kubeproxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf"
)

// Validate returns everything that is wrong with the values. Fields of the
// TandemConfiguration have paths that begin with its kind.
func (c *Config) Validate() field.ErrorList {
	var all field.ErrorList
	add := func(at *field.Path, value any, format string, args ...any) {
		all = append(all, field.Invalid(at, value, fmt.Sprintf(format, args...)))
	}

	k := &c.KubeProxy
	path := func(names ...string) *field.Path { return field.NewPath(names[0], names[1:]...) }
	if k.ClientConnection.Burst < 0 {
		add(path("clientConnection", "burst"), k.ClientConnection.Burst, "must not be negative")
	}
	if _, err := netip.ParseAddr(k.BindAddress); err != nil {
		add(path("bindAddress"), k.BindAddress, "must be an IP address")
	}
	for _, server := range []struct{ name, value string }{
		{"healthzBindAddress", k.HealthzBindAddress}, {"metricsBindAddress", k.MetricsBindAddress},
	} {
		if why := badHostPort(server.value); why != "" {
			add(path(server.name), server.value, "%s", why)
		}
	}
	if k.ConfigSyncPeriod.Duration <= 0 {
		add(path("configSyncPeriod"), k.ConfigSyncPeriod.Duration.String(), "must be greater than 0")
	}
	if adj := *k.OOMScoreAdj; adj < -1000 || adj > 1000 {
		add(path("oomScoreAdj"), adj, "must be between -1000 and 1000")
	}

	switch k.DetectLocalMode {
	case "", LocalModeClusterCIDR:
		if _, err := ParseClusterCIDR(k.ClusterCIDR); err != nil {
			add(path("clusterCIDR"), k.ClusterCIDR, "%v", err)
		}
	case LocalModeNodeCIDR:
	case LocalModeBridgeInterface:
		if k.DetectLocal.BridgeInterface == "" {
			all = append(all, field.Required(path("detectLocal", "bridgeInterface"), "detectLocalMode BridgeInterface needs a device"))
		}
	case LocalModeInterfaceNamePrefix:
		if k.DetectLocal.InterfaceNamePrefix == "" {
			all = append(all, field.Required(path("detectLocal", "interfaceNamePrefix"), "detectLocalMode InterfaceNamePrefix needs a prefix"))
		}
	default:
		all = append(all, field.NotSupported(path("detectLocalMode"), k.DetectLocalMode, localModes))
	}
	for _, text := range k.NodePortAddresses {
		if _, _, err := proxier.ParseNodePortSelector([]string{text}, false); err != nil {
			add(path("nodePortAddresses"), text, "must be CIDRs, or the words primary, localhost, all")
		}
	}

	if hidden := k.ShowHiddenMetricsForVersion; hidden != "" && hidden != previousMinor() {
		add(path("showHiddenMetricsForVersion"), hidden, "must be the previous version, %s", previousMinor())
	}

	if bit := *k.IPTables.MasqueradeBit; bit < 0 || bit > 31 {
		add(path("iptables", "masqueradeBit"), bit, "must be between 0 and 31")
	}
	if d := k.IPTables.SyncPeriod.Duration; d <= 0 {
		add(path("iptables", "syncPeriod"), d.String(), "must be greater than 0")
	} else if least := k.IPTables.MinSyncPeriod.Duration; least < 0 || least > d {
		add(path("iptables", "minSyncPeriod"), least.String(), "must not be negative, and not be greater than syncPeriod, which is %v", d)
	}

	if k.Mode == ModeIPVS { // as upstream, which does not look otherwise
		all = append(all, c.validateIPVS()...)
	}

	t := field.NewPath(TandemKind)
	e, at := &c.Tandem.EBPF, t.Child("ebpf")
	positive := func(name string, d time.Duration) {
		if d <= 0 {
			add(at.Child(name), d.String(), "must be greater than 0")
		}
	}
	positive("syncPeriod", e.SyncPeriod.Duration)
	positive("minSyncPeriod", e.MinSyncPeriod.Duration)
	if e.SyncPeriod.Duration > 0 && e.MinSyncPeriod.Duration > e.SyncPeriod.Duration {
		add(at.Child("minSyncPeriod"), e.MinSyncPeriod.Duration.String(), "must not be greater than syncPeriod, which is %v", e.SyncPeriod.Duration)
	}
	positive("tcpOpeningTimeout", e.TCPOpeningTimeout.Duration)
	positive("tcpClosedTimeout", e.TCPClosedTimeout.Duration)
	if _, err := ParsePortRange(e.NodePortRange); err != nil {
		add(at.Child("nodePortRange"), e.NodePortRange, "%v", err)
	}
	for _, list := range []struct {
		name  string
		names []string
	}{{"devices", e.Devices}, {"podDevices", e.PodDevices}} {
		for i, name := range list.names {
			if name == "" || name == "+" {
				add(at.Child(list.name).Index(i), name, "must be the name of a device, or the beginning of one with a + behind")
			}
		}
	}
	for i, mode := range e.Fallback {
		if mode != ModeIPVS && mode != ModeIPTables && (mode != FallbackNone || len(e.Fallback) > 1) {
			all = append(all, field.NotSupported(at.Child("fallback").Index(i), mode, []string{ModeIPVS, ModeIPTables, FallbackNone + ", alone"}))
		}
	}
	if e.SocketLB != SocketLBAll && e.SocketLB != SocketLBHost {
		all = append(all, field.NotSupported(at.Child("socketLB"), e.SocketLB, []string{SocketLBAll, SocketLBHost}))
	}
	for _, size := range []struct {
		name  string
		value uint32
	}{
		{"maxFrontends", e.MaxFrontends}, {"maxServices", e.MaxServices}, {"maxBackends", e.MaxBackends}, {"maxSlots", e.MaxSlots},
		{"maxRanges", e.MaxRanges}, {"maxLocals", e.MaxLocals}, {"maxAffinity", e.MaxAffinity}, {"maxUDPPeers", e.MaxUDPPeers},
		{"maxTCPFlows", e.MaxTCPFlows}, {"maxUDPFlows", e.MaxUDPFlows}, {"maxYoungFlows", e.MaxYoungFlows}, {"maxOptOuts", e.MaxOptOuts},
	} {
		if size.value < minSize || size.value > maxSize {
			add(at.Child(size.name), size.value, "must be between %d and %d", minSize, maxSize)
		}
	}

	if c.Tandem.Manifests != "" && k.ClientConnection.Kubeconfig != "" {
		add(t.Child("manifests"), c.Tandem.Manifests, "stands in for an API server, but clientConnection.kubeconfig names one: %q", k.ClientConnection.Kubeconfig)
	}
	return all
}

var localModes = []kubeproxyv1alpha1.LocalMode{LocalModeClusterCIDR, LocalModeNodeCIDR, LocalModeBridgeInterface, LocalModeInterfaceNamePrefix}

// ParseClusterCIDR reads clusterCIDR: nothing, a CIDR, or one of each family.
func ParseClusterCIDR(text string) (list []netip.Prefix, err error) {
	if text == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(text, ",") {
		p, err := netip.ParsePrefix(strings.TrimSpace(part))
		if err != nil || p.Addr().Is4In6() {
			return nil, fmt.Errorf("%q is no CIDR", part)
		}
		list = append(list, p.Masked())
	}
	if len(list) > 2 || len(list) == 2 && list[0].Addr().Is4() == list[1].Addr().Is4() {
		return nil, errors.New("must be one CIDR, or one of each address family")
	}
	return list, nil
}

// ParsePortRange reads a range of ports as the API server's flag
// service-node-port-range has it: two numbers with a - between them.
func ParsePortRange(text string) (ebpf.PortRange, error) {
	first, last, ok := strings.Cut(text, "-")
	f, err1 := strconv.ParseUint(strings.TrimSpace(first), 10, 16)
	l, err2 := strconv.ParseUint(strings.TrimSpace(last), 10, 16)
	if !ok || err1 != nil || err2 != nil || f == 0 || l < f {
		return ebpf.PortRange{}, errors.New("must be two ports with a - between them, the lower one first")
	}
	return ebpf.PortRange{First: uint16(f), Last: uint16(l)}, nil
}

// The bounds of ebpf.Sizes, named here field by field.
const (
	minSize = 2
	maxSize = 1 << 24
)

// ValidateMode says whether this build has the mode.
func ValidateMode(mode string, available []string) error {
	have := "this build has: " + strings.Join(available, ", ")
	for _, m := range available {
		if mode == m {
			return nil
		}
	}
	switch mode {
	case ModeEBPF, ModeIPTables, ModeIPVS, ModeNFTables:
		return fmt.Errorf("mode %s is not in this build; %s", mode, have)
	}
	return fmt.Errorf("unknown mode %q; %s", mode, have)
}

// previousMinor is the version before the one of the metrics library.
func previousMinor() string {
	v := utilversion.MustParse(version.DefaultKubeBinaryVersion)
	return fmt.Sprintf("%d.%d", v.Major(), v.Minor()-1)
}

func badHostPort(text string) string {
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return "must be an IP address and port"
	}
	if _, err := netip.ParseAddr(host); err != nil {
		return "must begin with an IP address"
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return "must have a port between 1 and 65535"
	}
	return ""
}

func (c *Config) validateIPVS() (all field.ErrorList) {
	v, at := &c.KubeProxy.IPVS, field.NewPath("ipvs")
	add := func(name string, value any, format string, args ...any) {
		all = append(all, field.Invalid(at.Child(name), value, fmt.Sprintf(format, args...)))
	}
	if d := v.SyncPeriod.Duration; d <= 0 {
		add("syncPeriod", d.String(), "must be greater than 0")
	} else if least := v.MinSyncPeriod.Duration; least < 0 || least > d {
		add("minSyncPeriod", least.String(), "must not be negative, and not be greater than syncPeriod, which is %v", d)
	}
	for _, t := range []struct {
		name string
		is   time.Duration
	}{{"tcpTimeout", v.TCPTimeout.Duration}, {"tcpFinTimeout", v.TCPFinTimeout.Duration}, {"udpTimeout", v.UDPTimeout.Duration}} {
		if t.is < 0 {
			add(t.name, t.is.String(), "must not be negative")
		}
	}
	for i, text := range v.ExcludeCIDRs {
		if _, err := netip.ParsePrefix(text); err != nil {
			all = append(all, field.Invalid(at.Child("excludeCIDRs").Index(i), text, "must be a CIDR"))
		}
	}
	if d := c.Tandem.IPVS.DrainTimeout.Duration; d <= 0 {
		all = append(all, field.Invalid(field.NewPath(TandemKind, "ipvs", "drainTimeout"), d.String(), "must be greater than 0"))
	}
	return all
}
