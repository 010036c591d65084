// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"

	"github.com/tandem-proxy/tandem/proxier"
)

// Ports of the two HTTP servers.
const (
	HealthzPort = 10256
	MetricsPort = 10249
)

// DefaultStateDirectory is where commands of operators are kept.
const DefaultStateDirectory = "/run/tandem"

// defaultContentType is what the client speaks with the API server.
const defaultContentType = "application/vnd.kubernetes.protobuf"

// New is a configuration with every default filled in.
func New() *Config {
	c := &Config{}
	c.SetDefaults()
	// As upstream's flag has it; in a file, nothing is 0.
	c.KubeProxy.IPVS.MinSyncPeriod.Duration = time.Second
	return c
}

// SetDefaults fills in what is unset. As with upstream every zero value counts
// as unset: kubeadm writes all fields, most of them as "", 0 or null.
func (c *Config) SetDefaults() {
	k := &c.KubeProxy
	k.APIVersion, k.Kind = KubeProxyAPIVersion, KubeProxyKind
	logsapi.SetRecommendedLoggingConfiguration(&k.Logging)
	orDefault(&k.ClientConnection.ContentType, defaultContentType)
	orDefault(&k.ClientConnection.QPS, 5)
	orDefault(&k.ClientConnection.Burst, 10)
	orDefault(&k.BindAddress, "0.0.0.0")
	c.setAddressDefaults()
	orDefault(&k.ConfigSyncPeriod.Duration, 15*time.Minute)
	c.setModeDefaults()
	if k.IPTables.MasqueradeBit == nil {
		k.IPTables.MasqueradeBit = new(int32(14))
	}
	orDefault(&k.IPTables.SyncPeriod.Duration, 30*time.Second)
	orDefault(&k.IPTables.MinSyncPeriod.Duration, time.Second)
	if k.IPTables.LocalhostNodePorts == nil {
		k.IPTables.LocalhostNodePorts = new(true)
	}
	orDefault(&k.IPVS.SyncPeriod.Duration, 30*time.Second)
	orDefault(&k.NFTables.SyncPeriod.Duration, 30*time.Second)
	orDefault(&k.NFTables.MinSyncPeriod.Duration, time.Second)
	if k.NFTables.MasqueradeBit == nil {
		k.NFTables.MasqueradeBit = new(int32(14))
	}
	ct := &k.Conntrack
	if ct.MaxPerCore == nil {
		ct.MaxPerCore = new(int32(32 * 1024))
	}
	if ct.Min == nil {
		ct.Min = new(int32(128 * 1024))
	}
	if ct.TCPEstablishedTimeout == nil {
		ct.TCPEstablishedTimeout = &metav1.Duration{Duration: 24 * time.Hour}
	}
	if ct.TCPCloseWaitTimeout == nil {
		ct.TCPCloseWaitTimeout = &metav1.Duration{Duration: time.Hour}
	}
	if k.FeatureGates == nil {
		k.FeatureGates = map[string]bool{}
	}
	if k.OOMScoreAdj == nil {
		// A proxy killed for memory would leave the node with old routes.
		k.OOMScoreAdj = new(int32(-999))
	}

	t := &c.Tandem
	t.APIVersion, t.Kind = TandemAPIVersion, TandemKind
	// Longer than the kubelet gives a pod to end.
	orDefault(&t.TakeOverDelay, metav1.Duration{Duration: 40 * time.Second})
	orDefault(&t.StateDirectory, DefaultStateDirectory)
	orDefault(&t.LoadBalancer.Algorithm, AlgorithmRandom)
	orDefault(&t.LoadBalancer.Mode, ForwardingSNAT)
	orDefault(&t.LoadBalancer.DSRDispatch, DispatchIPIP)
	e, runner := &t.EBPF, proxier.DefaultRunnerOptions()
	orDefault(&e.ProcRoot, "/proc")
	orDefault(&e.MinSyncPeriod, metav1.Duration{Duration: runner.MinInterval})
	orDefault(&e.SyncPeriod, metav1.Duration{Duration: runner.MaxInterval})
	orDefault(&e.SocketLB, SocketLBAll)
	orDefault(&e.Acceleration, AccelerationDisabled)
	orDefault(&e.NodePortRange, "30000-32767")
	if len(e.Fallback) == 0 {
		e.Fallback = []string{ModeIPTables}
	}
	if e.TCPPeerNames == nil {
		e.TCPPeerNames = new(true)
	}
	if e.ProtectNodePorts == nil {
		e.ProtectNodePorts = new(true)
	}
	if e.ReserveNodePorts == nil {
		e.ReserveNodePorts = new(true)
	}
	orDefault(&e.TCPOpeningTimeout, metav1.Duration{Duration: time.Minute})
	orDefault(&e.TCPClosedTimeout, metav1.Duration{Duration: 10 * time.Second})
	if e.YieldGracePeriod == nil {
		// Enough for its first sync on a node that can reach the API server.
		e.YieldGracePeriod = &metav1.Duration{Duration: 30 * time.Second}
	}
	orDefault(&t.IPVS.DrainTimeout, metav1.Duration{Duration: 15 * time.Minute})
	// These fit the largest clusters that upstream is tested with (10,000 Services, 150,000
	// pods) with room to spare, in 55 MiB of kernel memory. Flows are derived from conntrack's
	// limit.
	orDefault(&e.MaxFrontends, 1<<17)
	orDefault(&e.MaxServices, 1<<16)
	orDefault(&e.MaxBackends, 1<<18)
	orDefault(&e.MaxSlots, 1<<19)
	orDefault(&e.MaxRanges, 1<<16)
	orDefault(&e.MaxLocals, 1<<12)
	orDefault(&e.MaxAffinity, 1<<16)
	orDefault(&e.MaxUDPPeers, 1<<16)
	orDefault(&e.MaxOptOuts, 1<<12)
}

// setModeDefaults is for values that a flag may have emptied.
func (c *Config) setModeDefaults() {
	if c.KubeProxy.Mode == "" {
		delete(c.origin, "mode") // kubeadm writes it empty
	}
	orDefault((*string)(&c.KubeProxy.Mode), ModeIPTables)
	orDefault((*string)(&c.KubeProxy.DetectLocalMode), LocalModeClusterCIDR)
}

func (c *Config) setAddressDefaults() {
	k := &c.KubeProxy
	anyHost, loopback := "0.0.0.0", "127.0.0.1"
	if addr, err := proxier.ParseAddr(k.BindAddress); err == nil && addr.Is6() {
		anyHost, loopback = "::", "::1"
	}
	k.HealthzBindAddress = withPort(k.HealthzBindAddress, anyHost, HealthzPort)
	k.MetricsBindAddress = withPort(k.MetricsBindAddress, loopback, MetricsPort)
}

func orDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// withPort completes the address of a server: nothing is the default host, and
// an address alone gets the port.
func withPort(address, host string, port int) string {
	text := strconv.Itoa(port)
	if address == "" {
		return net.JoinHostPort(host, text)
	}
	if _, err := proxier.ParseAddr(address); err == nil {
		return net.JoinHostPort(address, text)
	}
	return address
}
