// SPDX-License-Identifier: Apache-2.0

package config

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeproxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
)

// The documents of a configuration file.
const (
	KubeProxyAPIVersion = "kubeproxy.config.k8s.io/v1alpha1"
	KubeProxyKind       = "KubeProxyConfiguration"
	TandemAPIVersion    = "config.tandem-proxy.dev/v1alpha1"
	TandemKind          = "TandemConfiguration"
)

// Modes, in the words of --proxy-mode.
const (
	ModeEBPF     = "ebpf"
	ModeIPTables = "iptables"
	ModeIPVS     = "ipvs"
	ModeNFTables = "nftables"
)

// FallbackNone says that no other mode may stand in.
const FallbackNone = "none"

// How pods are told from others, in the words of --detect-local-mode.
const (
	LocalModeClusterCIDR         = "ClusterCIDR"
	LocalModeNodeCIDR            = "NodeCIDR"
	LocalModeBridgeInterface     = "BridgeInterface"
	LocalModeInterfaceNamePrefix = "InterfaceNamePrefix"
)

// Config is everything the proxy can be told.
type Config struct {
	KubeProxy kubeproxyv1alpha1.KubeProxyConfiguration
	Tandem    TandemConfiguration

	// origin says where a field was set, by its path.
	origin map[string]string
	// healthzPort and metricsPort are flags of old; noHealthz says that the first
	// is 0, by which alone the health server can be turned off.
	healthzPort, metricsPort int32
	noHealthz                bool
}

// TandemConfiguration holds the options that upstream does not have.
type TandemConfiguration struct {
	metav1.TypeMeta `json:",inline"`

	// Manifests is a directory of YAML manifests that stands in for the API
	// server.
	Manifests string `json:"manifests,omitempty"`
	// StrictSourceRanges has loadBalancerSourceRanges that name one address
	// family alone keep everybody out of the other one. Upstream leaves it open.
	StrictSourceRanges bool `json:"strictSourceRanges,omitempty"`
	// EBPF are the options of mode ebpf.
	EBPF EBPFConfiguration `json:"ebpf,omitempty"`
	// IPVS holds the options of mode ipvs that are not in the KubeProxyConfiguration.
	IPVS IPVSConfiguration `json:"ipvs,omitempty"`
}

// EBPFConfiguration holds the options of mode ebpf. Every field left out, or
// zero, has its default. The mode borrows masqueradeAll and localhostNodePorts
// from the iptables section of the KubeProxyConfiguration, as mode ipvs does
// upstream.
type EBPFConfiguration struct {
	// CgroupRoot is the cgroup2 directory whose processes are served.
	CgroupRoot string `json:"cgroupRoot,omitempty"`
	// ProcRoot is where the network namespaces of pods are found.
	ProcRoot string `json:"procRoot,omitempty"`
	// MinSyncPeriod is the least time between two syncs.
	MinSyncPeriod metav1.Duration `json:"minSyncPeriod,omitempty"`
	// SyncPeriod is the time after which the kernel is compared unasked.
	SyncPeriod metav1.Duration `json:"syncPeriod,omitempty"`
	// SocketLB says whose sockets are served: SocketLBAll or SocketLBHost.
	SocketLB string `json:"socketLB,omitempty"`
	// Fallback are modes that stand in where this one cannot run, in the order to
	// try: ModeIPVS, ModeIPTables. Rules carry what it cannot where it does.
	// FallbackNone alone has the process fail instead.
	Fallback []string `json:"fallback,omitempty"`
	// Devices are those by which node traffic comes in: names, or beginnings
	// of names with a + behind. Empty means those that routes and addresses
	// tell.
	Devices []string `json:"devices,omitempty"`
	// PodDevices are devices of pods, named as Devices are, whose packets are
	// to be served besides those of network namespaces that are opted out: of
	// virtual machines, for one.
	PodDevices []string `json:"podDevices,omitempty"`
	// NodePortRange is the range that the API server allocates NodePorts from:
	// connections to remote backends get no source port out of it.
	NodePortRange string `json:"nodePortRange,omitempty"`
	// ProtectNodePorts keeps processes of the host from binding NodePorts.
	ProtectNodePorts *bool `json:"protectNodePorts,omitempty"`
	// ReserveNodePorts adds NodePortRange to net.ipv4.ip_local_reserved_ports
	// where it overlaps with the range of ports that the kernel gives out.
	ReserveNodePorts *bool `json:"reserveNodePorts,omitempty"`
	// ResetRemovedBackends answers clients outside, whose TCP backend the API
	// does not know any more, by a reset. Otherwise their connections are left
	// to their ends, as upstream does.
	ResetRemovedBackends bool `json:"resetRemovedBackends,omitempty"`
	// TCPOpeningTimeout is how long a connection from outside is remembered
	// that is not established, and TCPClosedTimeout how long one that is over.
	// The others are those of the conntrack section of the
	// KubeProxyConfiguration.
	TCPOpeningTimeout metav1.Duration `json:"tcpOpeningTimeout,omitempty"`
	TCPClosedTimeout  metav1.Duration `json:"tcpClosedTimeout,omitempty"`

	MaxFrontends  uint32 `json:"maxFrontends,omitempty"`
	MaxServices   uint32 `json:"maxServices,omitempty"`
	MaxBackends   uint32 `json:"maxBackends,omitempty"`
	MaxSlots      uint32 `json:"maxSlots,omitempty"`
	MaxRanges     uint32 `json:"maxRanges,omitempty"`
	MaxLocals     uint32 `json:"maxLocals,omitempty"`
	MaxAffinity   uint32 `json:"maxAffinity,omitempty"`
	MaxTCPFlows   uint32 `json:"maxTCPFlows,omitempty"`
	MaxUDPFlows   uint32 `json:"maxUDPFlows,omitempty"`
	MaxYoungFlows uint32 `json:"maxYoungFlows,omitempty"`
	MaxUDPPeers   uint32 `json:"maxUDPPeers,omitempty"`
	MaxOptOuts    uint32 `json:"maxOptOuts,omitempty"`
}

// IPVSConfiguration holds the options of mode ipvs that upstream does not have.
type IPVSConfiguration struct {
	// UpstreamSemantics has virtual servers do what upstream's do where that
	// differs from other modes: one set of endpoints for everybody, and all of
	// them where a Local policy leaves none.
	UpstreamSemantics bool `json:"upstreamSemantics,omitempty"`
	// DrainTimeout is how long a TCP endpoint that is gone keeps its connections
	// at most.
	DrainTimeout metav1.Duration `json:"drainTimeout,omitempty"`
}

// Whose sockets are served.
const (
	SocketLBAll  = "all"  // of the host and of every pod
	SocketLBHost = "host" // of the host's network namespace only
)
