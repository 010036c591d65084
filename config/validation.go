// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilversion "k8s.io/apimachinery/pkg/util/version"
	"k8s.io/component-base/version"
	kubeproxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/maglev"
)

// leastAPIAge is the least ReadyMaxAPIAge: API servers send a bookmark each minute.
const leastAPIAge = 2 * time.Minute

// Validate returns all invalid values. Fields of the
// TandemConfiguration have paths that begin with its kind.
func (c *Config) Validate() field.ErrorList {
	var all field.ErrorList
	add := func(at *field.Path, value any, format string, args ...any) {
		all = append(all, field.Invalid(at, value, fmt.Sprintf(format, args...)))
	}

	k := &c.KubeProxy
	path := func(names ...string) *field.Path { return field.NewPath(names[0], names[1:]...) }
	if k.ClientConnection.Burst < 0 {
		add(path("clientConnection", "burst"), k.ClientConnection.Burst, notNegative)
	}
	if _, err := proxier.ParseAddr(k.BindAddress); err != nil {
		add(path("bindAddress"), k.BindAddress, "not a valid textual representation of an IP address")
	}
	for _, server := range []struct{ name, value string }{
		{"healthzBindAddress", k.HealthzBindAddress}, {"metricsBindAddress", k.MetricsBindAddress},
	} {
		if server.value == "" && c.noHealthz && server.name == "healthzBindAddress" {
			continue
		}
		if why := badHostPort(server.value); why != "" {
			add(path(server.name), server.value, "%s", why)
		}
	}
	if d := k.ConfigSyncPeriod.Duration; d <= 0 {
		add(path("configSyncPeriod"), d.String(), greaterThan0)
	}
	if adj := *k.OOMScoreAdj; adj < -1000 || adj > 1000 {
		add(path("oomScoreAdj"), adj, "must be within the range [-1000, 1000]")
	}

	switch k.DetectLocalMode {
	case "", LocalModeClusterCIDR:
		if _, err := ParseClusterCIDR(k.ClusterCIDR); err != nil {
			add(path("clusterCIDR"), k.ClusterCIDR, "%v", err)
		}
	case LocalModeNodeCIDR:
	case LocalModeBridgeInterface:
		if k.DetectLocal.BridgeInterface == "" {
			all = append(all, field.Required(path("detectLocal", "bridgeInterface"), "must not be empty with detectLocalMode BridgeInterface"))
		}
	case LocalModeInterfaceNamePrefix:
		if k.DetectLocal.InterfaceNamePrefix == "" {
			all = append(all, field.Required(path("detectLocal", "interfaceNamePrefix"), "must not be empty with detectLocalMode InterfaceNamePrefix"))
		}
	default:
		all = append(all, field.NotSupported(path("detectLocalMode"), k.DetectLocalMode, localModes))
	}
	for i, text := range k.NodePortAddresses {
		at := path("nodePortAddresses").Index(i)
		if s, _, err := proxier.ParseNodePortSelector([]string{text}, false); err != nil {
			add(at, text, "must be a valid CIDR or one of the keywords 'primary', 'localhost', 'all'")
		} else if len(s.CIDRs) == 0 && slices.Contains(k.NodePortAddresses[:i], text) {
			all = append(all, field.Duplicate(at, text))
		}
	}

	if hidden := k.ShowHiddenMetricsForVersion; hidden != "" && hidden != previousMinor() {
		add(path("showHiddenMetricsForVersion"), hidden, "must be the previous version, %s", previousMinor())
	}

	if bit := *k.IPTables.MasqueradeBit; bit < 0 || bit > 31 {
		add(path("iptables", "masqueradeBit"), bit, "must be within the range [0, 31]")
	}
	// As upstream, which does not look at the periods of other modes.
	if slices.Contains(c.modes(), ModeIPTables) {
		all = append(all, validatePeriods("iptables", k.IPTables.SyncPeriod.Duration, k.IPTables.MinSyncPeriod.Duration)...)
	}
	if k.Mode == ModeNFTables {
		if bit := *k.NFTables.MasqueradeBit; bit < 0 || bit > 31 {
			add(path("nftables", "masqueradeBit"), bit, "must be within the range [0, 31]")
		}
		all = append(all, validatePeriods("nftables", k.NFTables.SyncPeriod.Duration, k.NFTables.MinSyncPeriod.Duration)...)
	}
	all = append(all, c.validateConntrack()...)

	if slices.Contains(c.modes(), ModeIPVS) {
		all = append(all, c.validateIPVS()...)
	}

	t := field.NewPath(TandemKind)
	e, at := &c.Tandem.EBPF, t.Child("ebpf")
	positive := func(name string, d time.Duration) {
		if d <= 0 {
			add(at.Child(name), d.String(), greaterThan0)
		}
	}
	positive("syncPeriod", e.SyncPeriod.Duration)
	positive("minSyncPeriod", e.MinSyncPeriod.Duration)
	if e.SyncPeriod.Duration > 0 && e.MinSyncPeriod.Duration > e.SyncPeriod.Duration {
		add(at.Child("minSyncPeriod"), e.MinSyncPeriod.Duration.String(), "must not be greater than syncPeriod, which is %v", e.SyncPeriod.Duration)
	}
	positive("tcpOpeningTimeout", e.TCPOpeningTimeout.Duration)
	positive("tcpClosedTimeout", e.TCPClosedTimeout.Duration)
	if grace := e.YieldGracePeriod.Duration; grace != 0 && grace < minYieldGrace {
		add(at.Child("yieldGracePeriod"), grace.String(), "must be 0, which means never, or at least %v", minYieldGrace)
	}
	if _, err := ParsePortRange(e.NodePortRange); err != nil {
		add(at.Child("nodePortRange"), e.NodePortRange, "%v", err)
	}
	for _, list := range []struct {
		name  string
		names []string
	}{{"devices", e.Devices}, {"podDevices", e.PodDevices}} {
		for i, name := range list.names {
			if !isDeviceName(strings.TrimSuffix(name, "+")) {
				add(at.Child(list.name).Index(i), name, "must be the name of a device, or a name prefix followed by a +: up to 15 characters without spaces, / and :")
			}
		}
	}
	for i, mode := range e.Fallback {
		if mode != ModeIPVS && mode != ModeIPTables && (mode != FallbackNone || len(e.Fallback) > 1) {
			all = append(all, field.NotSupported(at.Child("fallback").Index(i), mode, []string{ModeIPVS, ModeIPTables, FallbackNone + " (alone)"}))
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
		{"maxOptOuts", e.MaxOptOuts},
		{"maxTCPFlows", cmp.Or(e.MaxTCPFlows, minSize)}, {"maxUDPFlows", cmp.Or(e.MaxUDPFlows, minSize)}, {"maxYoungFlows", cmp.Or(e.MaxYoungFlows, minSize)},
	} {
		if size.value < minSize || size.value > maxSize {
			add(at.Child(size.name), size.value, "must be between %d and %d", minSize, maxSize)
		}
	}

	if e.ServiceSignals && !*e.TCPPeerNames {
		add(at.Child("serviceSignals"), true, "needs tcpPeerNames: sockets have to remember which Service they dialled")
	}
	if bytes, err := ParseMemory(e.MaxMapMemory); err != nil || bytes != 0 && bytes < minMapMemory {
		add(at.Child("maxMapMemory"), e.MaxMapMemory, "must be empty or a quantity of at least 4Mi, such as 64Mi")
	}
	if known := []string{AccelerationDisabled, AccelerationBestEffort, AccelerationNative}; !slices.Contains(known, e.Acceleration) {
		all = append(all, field.NotSupported(at.Child("acceleration"), e.Acceleration, known))
	}

	lb := &c.Tandem.LoadBalancer
	if _, err := proxier.ParseAlgorithm(lb.Algorithm); err != nil {
		all = append(all, field.NotSupported(t.Child("loadBalancer", "algorithm"), lb.Algorithm, []string{AlgorithmRandom, AlgorithmMaglev}))
	}
	if _, err := proxier.ParseForwarding(lb.Mode); err != nil {
		all = append(all, field.NotSupported(t.Child("loadBalancer", "mode"), lb.Mode, []string{ForwardingSNAT, ForwardingDSR, ForwardingHybrid}))
	}
	if known := []string{DispatchIPIP, DispatchGeneve, DispatchOpt}; !slices.Contains(known, lb.DSRDispatch) {
		all = append(all, field.NotSupported(t.Child("loadBalancer", "dsrDispatch"), lb.DSRDispatch, known))
	}
	if _, err := ParseSourceCIDR(lb.DSRSourceCIDR); err != nil {
		add(t.Child("loadBalancer", "dsrSourceCIDR"), lb.DSRSourceCIDR, "%v", err)
	}
	if size := lb.MaglevTableSize; size != 0 && !maglev.ValidSize(int(size)) {
		add(t.Child("loadBalancer", "maglevTableSize"), size, "must be 0 or one of %v", maglev.Sizes())
	}
	if d := c.Tandem.TakeOverDelay.Duration; d <= 0 {
		add(t.Child("takeOverDelay"), d.String(), greaterThan0)
	}
	if d := c.Tandem.ReadyMaxAPIAge.Duration; d != 0 && d < leastAPIAge {
		add(t.Child("readyMaxAPIAge"), d.String(), "must be 0, which means never, or at least %v", leastAPIAge)
	}
	if dir := c.Tandem.StateDirectory; !filepath.IsAbs(dir) {
		add(t.Child("stateDirectory"), dir, "must be an absolute path")
	}
	all = append(all, c.validateCoexistence()...)
	if c.Tandem.Manifests != "" && c.Tandem.HostPort {
		add(t.Child("hostPort"), true, "hostPorts are those of Pods, which only an API server has; manifests replaces it")
	}
	if c.Tandem.Manifests != "" && k.ClientConnection.Kubeconfig != "" {
		add(t.Child("manifests"), c.Tandem.Manifests, "replaces the API server, but clientConnection.kubeconfig names one: %q", k.ClientConnection.Kubeconfig)
	}
	return all
}

// minYieldGrace is long enough for a process that starts: one says once a second that it is alive, and with less,
// programs would take it for another kube-proxy.
const minYieldGrace = 2 * time.Second

// Upstream's words.
const (
	notNegative  = "must be greater than or equal to 0"
	greaterThan0 = "must be greater than 0"
)

// modes are the configured one and its fallbacks.
func (c *Config) modes() []string {
	mode := string(c.KubeProxy.Mode)
	if mode != ModeEBPF || c.Tandem.Coexistence.Enabled() {
		return []string{mode}
	}
	return append([]string{mode}, c.Tandem.EBPF.Fallback...)
}

func validatePeriods(section string, period, least time.Duration) (all field.ErrorList) {
	at := field.NewPath(section)
	if period <= 0 {
		all = append(all, field.Invalid(at.Child("syncPeriod"), period.String(), greaterThan0))
	}
	if least < 0 {
		all = append(all, field.Invalid(at.Child("minSyncPeriod"), least.String(), notNegative))
	}
	if period > 0 && least > period {
		all = append(all, field.Invalid(at.Child("minSyncPeriod"), least.String(), fmt.Sprintf("must not be greater than syncPeriod, which is %v", period)))
	}
	return all
}

func (c *Config) validateConntrack() (all field.ErrorList) {
	ct, at := &c.KubeProxy.Conntrack, field.NewPath("conntrack")
	for _, n := range []struct {
		name string
		is   int32
	}{{"maxPerCore", *ct.MaxPerCore}, {"min", *ct.Min}} {
		if n.is < 0 {
			all = append(all, field.Invalid(at.Child(n.name), n.is, notNegative))
		}
	}
	for _, t := range []struct {
		name string
		is   time.Duration
	}{
		{"tcpEstablishedTimeout", ct.TCPEstablishedTimeout.Duration}, {"tcpCloseWaitTimeout", ct.TCPCloseWaitTimeout.Duration},
		{"udpTimeout", ct.UDPTimeout.Duration}, {"udpStreamTimeout", ct.UDPStreamTimeout.Duration},
	} {
		if t.is < 0 {
			all = append(all, field.Invalid(at.Child(t.name), t.is.String(), notNegative))
		}
	}
	return all
}

var localModes = []kubeproxyv1alpha1.LocalMode{LocalModeClusterCIDR, LocalModeNodeCIDR, LocalModeBridgeInterface, LocalModeInterfaceNamePrefix}

// ParseClusterCIDR parses clusterCIDR: nothing, a CIDR, or one of each family.
func ParseClusterCIDR(text string) (list []netip.Prefix, err error) {
	if text == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(text, ",") {
		p, err := proxier.ParseCIDR(part)
		if err != nil {
			return nil, fmt.Errorf("must be a valid CIDR block (e.g. 10.100.0.0/16 or fde4:8dba:82e1::/48): %w", err)
		}
		list = append(list, p)
	}
	if len(list) > 2 || len(list) == 2 && list[0].Addr().Is4() == list[1].Addr().Is4() {
		return nil, errors.New("must be either a single CIDR or a dual-stack pair of CIDRs (e.g. 10.100.0.0/16,fde4:8dba:82e1::/48)")
	}
	return list, nil
}

// ParseSourceCIDR parses dsrSourceCIDR: nothing, a CIDR, or one of each family.
func ParseSourceCIDR(text string) ([]netip.Prefix, error) {
	list, err := ParseClusterCIDR(text)
	for _, p := range list {
		const least = 2 // bits
		if !p.Addr().IsGlobalUnicast() || p.Bits() == 0 || p.Bits() > p.Addr().BitLen()-least {
			return nil, fmt.Errorf("must have unicast addresses that packets can come from, 4 or more of them: %s", p)
		}
	}
	return list, err
}

// PortRange is a range of ports, both ends included.
type PortRange struct{ First, Last uint16 }

func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// ParsePortRange parses a range of ports as the API server's flag
// service-node-port-range: two numbers separated by a -.
func ParsePortRange(text string) (PortRange, error) {
	first, last, ok := strings.Cut(text, "-")
	f, err1 := strconv.ParseUint(strings.TrimSpace(first), 10, 16)
	l, err2 := strconv.ParseUint(strings.TrimSpace(last), 10, 16)
	if !ok || err1 != nil || err2 != nil || f == 0 || l < f {
		return PortRange{}, errors.New("must be two ports separated by a -, the lower one first")
	}
	return PortRange{First: uint16(f), Last: uint16(l)}, nil
}

// The bounds of map sizes: those that the eBPF datapath accepts.
const (
	minSize = 2
	// minMapMemory is about what maps begin with on the smallest machines, in bytes.
	minMapMemory = 4 << 20
	maxSize      = 1 << 24
)

// ValidateMode checks that this build has the mode, or serves it by another one.
func ValidateMode(mode string, available []string) error {
	if slices.Contains(available, mode) || mode == ModeNFTables {
		return nil
	}
	return fmt.Errorf("unknown mode %q: must be one of %s, %s", mode, strings.Join(available, ", "), ModeNFTables)
}

// previousMinor is the version before the one of the metrics library.
func previousMinor() string {
	v := utilversion.MustParse(version.DefaultKubeBinaryVersion)
	return fmt.Sprintf("%d.%d", v.Major(), v.Minor()-1)
}

func badHostPort(text string) string {
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return "must be IP:port"
	}
	if _, err := proxier.ParseAddr(host); err != nil {
		return fmt.Sprintf("%q must be a valid IP", host)
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return fmt.Sprintf("%q must be a valid port, from 1 to 65535", port)
	}
	return ""
}

func (c *Config) validateIPVS() (all field.ErrorList) {
	v, at := &c.KubeProxy.IPVS, field.NewPath("ipvs")
	add := func(name string, value any, format string, args ...any) {
		all = append(all, field.Invalid(at.Child(name), value, fmt.Sprintf(format, args...)))
	}
	all = append(all, validatePeriods("ipvs", v.SyncPeriod.Duration, v.MinSyncPeriod.Duration)...)
	for _, t := range []struct {
		name string
		is   time.Duration
	}{{"tcpTimeout", v.TCPTimeout.Duration}, {"tcpFinTimeout", v.TCPFinTimeout.Duration}, {"udpTimeout", v.UDPTimeout.Duration}} {
		if t.is < 0 {
			add(t.name, t.is.String(), notNegative)
		}
	}
	for i, text := range v.ExcludeCIDRs {
		if _, err := proxier.ParseCIDR(text); err != nil {
			all = append(all, field.Invalid(at.Child("excludeCIDRs").Index(i), text, "must be a valid CIDR"))
		}
	}
	if d := c.Tandem.IPVS.DrainTimeout.Duration; d <= 0 {
		all = append(all, field.Invalid(field.NewPath(TandemKind, "ipvs", "drainTimeout"), d.String(), greaterThan0))
	}
	return all
}

// isDeviceName reports whether a device can have a name, or names that begin so (dev_valid_name() in the kernel).
func isDeviceName(name string) bool {
	const longest = 15 // IFNAMSIZ-1
	return name != "" && name != "." && name != ".." && len(name) <= longest && !strings.ContainsFunc(name, func(r rune) bool {
		return r == '/' || r == ':' || unicode.IsSpace(r)
	})
}

// ParseMemory returns an amount of memory in bytes; 0 if the text is empty.
func ParseMemory(text string) (bytes uint64, err error) {
	if text == "" {
		return 0, nil
	}
	q, err := resource.ParseQuantity(text)
	if err != nil {
		return 0, fmt.Errorf("%q is no quantity: %w", text, err)
	}
	if q.Sign() < 0 {
		return 0, fmt.Errorf("%q is negative", text)
	}
	return uint64(q.Value()), nil
}
