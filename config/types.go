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

// FallbackNone disables the fallback to other modes.
const FallbackNone = "none"

// How traffic of pods is detected, in the words of --detect-local-mode.
const (
	LocalModeClusterCIDR         = "ClusterCIDR"
	LocalModeNodeCIDR            = "NodeCIDR"
	LocalModeBridgeInterface     = "BridgeInterface"
	LocalModeInterfaceNamePrefix = "InterfaceNamePrefix"
)

// Config is the whole configuration.
type Config struct {
	KubeProxy kubeproxyv1alpha1.KubeProxyConfiguration
	Tandem    TandemConfiguration

	// origin is where a field was set, by its path.
	origin map[string]string
	// healthzPort and metricsPort are deprecated flags. noHealthz says that the first
	// is 0, which is the only way to turn the health server off.
	healthzPort, metricsPort int32
	noHealthz                bool
}

// TandemConfiguration holds the options that upstream does not have.
type TandemConfiguration struct {
	metav1.TypeMeta `json:",inline"`

	// Manifests is a directory of YAML manifests to use instead of an API
	// server.
	Manifests string `json:"manifests,omitempty"`
	// StrictSourceRanges has loadBalancerSourceRanges that name one address family
	// only deny all clients of the other one. Upstream allows them.
	StrictSourceRanges bool `json:"strictSourceRanges,omitempty"`
	// ReadyMaxAPIAge is how long the API server may send no event or bookmark for a watched resource until /readyz fails. Bookmarks
	// come each minute. 0 is for ever: what was programmed keeps working.
	ReadyMaxAPIAge metav1.Duration `json:"readyMaxAPIAge,omitempty"`
	// HostPort serves the hostPorts of the pods of this node, beside the portmap plugin of the CNI or instead of it. The
	// process has to be allowed to list and watch Pods.
	HostPort bool `json:"hostPort,omitempty"`
	// LoadBalancer says how connections are spread over the endpoints of a Service.
	LoadBalancer LoadBalancerConfiguration `json:"loadBalancer,omitzero"`
	// Coexistence is for nodes where another kube-proxy stays.
	Coexistence CoexistenceConfiguration `json:"coexistence,omitzero"`
	// TakeOverDelay is how long a process waits at its start for another kube-proxy on this
	// node to end, before it takes over.
	TakeOverDelay metav1.Duration `json:"takeOverDelay,omitempty"`
	// StateDirectory is where commands of operators are kept, those about backends. It need not exist. Without a
	// directory of the host they last as long as the container.
	StateDirectory string `json:"stateDirectory,omitempty"`
	// EBPF are the options of mode ebpf.
	EBPF EBPFConfiguration `json:"ebpf,omitempty"`
	// IPVS holds the options of mode ipvs that are not in the KubeProxyConfiguration.
	IPVS IPVSConfiguration `json:"ipvs,omitempty"`
}

// LoadBalancerConfiguration is how connections are spread over the endpoints of Services whose
// annotations do not say otherwise.
type LoadBalancerConfiguration struct {
	// Algorithm is AlgorithmRandom or AlgorithmMaglev.
	Algorithm string `json:"algorithm,omitempty"`
	// MaglevTableSize is the number of slots of each table: 251, 509, 1021, 2039, 4093, 8191, 16381, 32749,
	// 65521 or 131071. 0 is for the smallest that has 100 slots for each endpoint.
	MaglevTableSize uint32 `json:"maglevTableSize,omitempty"`
	// MaglevSeed changes which endpoint a connection gets. It has to be the same on all nodes.
	MaglevSeed uint32 `json:"maglevSeed,omitempty"`
	// Mode is how mode ebpf sends packets of clients outside to endpoints on other nodes: ForwardingSNAT,
	// ForwardingDSR or ForwardingHybrid.
	Mode string `json:"mode,omitempty"`
	// DSRDispatch is in what nodes send packets of direct server return to each other: DispatchIPIP, DispatchGeneve or
	// DispatchOpt. They take any.
	DSRDispatch string `json:"dsrDispatch,omitempty"`
	// DSRSourceCIDR is a CIDR, or one of each family separated by a comma, of source addresses over which DispatchIPIP
	// spreads connections, so that the network cards of their nodes do. It has to be the same on all nodes, which take such packets
	// from these addresses too. Empty for the nodes' own.
	DSRSourceCIDR string `json:"dsrSourceCIDR,omitempty"`
}

// Dispatches of direct server return.
const (
	DispatchIPIP   = "ipip"
	DispatchGeneve = "geneve"
	DispatchOpt    = "opt"
)

// Modes of forwarding.
const (
	ForwardingSNAT   = "snat"
	ForwardingDSR    = "dsr"
	ForwardingHybrid = "hybrid"
)

// Algorithms of load balancing.
const (
	AlgorithmRandom = "random"
	AlgorithmMaglev = "maglev"
)

// Acceleration by XDP.
const (
	AccelerationDisabled = "disabled"
	// AccelerationBestEffort uses XDP on uplinks whose driver runs it.
	AccelerationBestEffort = "best-effort"
	// AccelerationNative reports an error on others.
	AccelerationNative = "native"
)

// EBPFConfiguration holds the options of mode ebpf. Every field left out, or
// zero, has its default. The mode borrows masqueradeAll and localhostNodePorts
// from the iptables section of the KubeProxyConfiguration, as mode ipvs does
// upstream.
type EBPFConfiguration struct {
	// CgroupRoot is the cgroup2 directory whose processes are served.
	CgroupRoot string `json:"cgroupRoot,omitempty"`
	// ProcRoot is where the network namespaces of pods are found.
	ProcRoot string `json:"procRoot,omitempty"`
	// MinSyncPeriod is the minimum time between two syncs.
	MinSyncPeriod metav1.Duration `json:"minSyncPeriod,omitempty"`
	// SyncPeriod is how often everything is compared with the kernel, even if
	// nothing changed.
	SyncPeriod metav1.Duration `json:"syncPeriod,omitempty"`
	// SocketLB says which sockets are load-balanced: SocketLBAll or SocketLBHost.
	SocketLB string `json:"socketLB,omitempty"`
	// Fallback are the modes to run if this one cannot, in order of preference:
	// ModeIPVS, ModeIPTables. Unless it is FallbackNone, which has the process fail
	// instead, rules also serve what programs cannot.
	Fallback []string `json:"fallback,omitempty"`
	// Devices are those that receive traffic for this node: names, or name prefixes
	// followed by a +. Empty means those that are found by routes and addresses.
	Devices []string `json:"devices,omitempty"`
	// PodDevices are devices of pods, in the format of Devices, whose traffic is
	// load-balanced by packet from the start, such as those of virtual machines. Those of network
	// namespaces that opted out, and those by which untranslated packets for Services come
	// in, are found automatically.
	PodDevices []string `json:"podDevices,omitempty"`
	// NodePortRange is the range that the API server allocates NodePorts from. It
	// is not used for source ports of connections to remote backends.
	NodePortRange string `json:"nodePortRange,omitempty"`
	// ProtectNodePorts keeps processes of the host from binding NodePorts.
	ProtectNodePorts *bool `json:"protectNodePorts,omitempty"`
	// ServiceSignals watches TCP connections of sockets of this node to Services: what came of them, how long they took to be
	// established, their round-trip times and bytes. It needs TCPPeerNames.
	ServiceSignals bool `json:"serviceSignals,omitempty"`
	// TCPPeerNames makes getpeername() of TCP clients show the Service's address, as it does with UDP. Without it
	// they see the endpoint's, and connect() costs less.
	TCPPeerNames *bool `json:"tcpPeerNames,omitempty"`
	// ReserveNodePorts adds NodePortRange to net.ipv4.ip_local_reserved_ports
	// if it overlaps with the ephemeral ports.
	ReserveNodePorts *bool `json:"reserveNodePorts,omitempty"`
	// Acceleration is whether XDP forwards packets between clients outside and endpoints on
	// other nodes: AccelerationDisabled, AccelerationBestEffort or AccelerationNative.
	Acceleration string `json:"acceleration,omitempty"`
	// IgnoreHostFilters has programs serve clients outside also where rules of this host filter
	// packets before DNAT, or forward only connections that netfilter translates. Otherwise, rules
	// serve the frontends that this concerns.
	IgnoreHostFilters bool `json:"ignoreHostFilters,omitempty"`
	// MasqueradeLocalBackends hides clients outside from backends on this node, as from others,
	// where a Service masquerades them (externalTrafficPolicy Cluster). Rules serve these then.
	MasqueradeLocalBackends bool `json:"masqueradeLocalBackends,omitempty"`
	// ResetRemovedBackends sends a reset to clients outside whose TCP backend was
	// removed from the API. Otherwise their connections are left alone, as upstream
	// does.
	ResetRemovedBackends bool `json:"resetRemovedBackends,omitempty"`
	// TCPOpeningTimeout is for connections from outside that are not established
	// yet, and TCPClosedTimeout for closed ones. Other timeouts are in the conntrack
	// section of the KubeProxyConfiguration.
	TCPOpeningTimeout metav1.Duration `json:"tcpOpeningTimeout,omitempty"`
	TCPClosedTimeout  metav1.Duration `json:"tcpClosedTimeout,omitempty"`
	// YieldGracePeriod is how long another kube-proxy has to hold the ports of this one,
	// while no process of this one runs, until the programs leave new connections to it.
	// 0 means never; otherwise it is at least 2 seconds.
	YieldGracePeriod *metav1.Duration `json:"yieldGracePeriod,omitempty"`

	// MaxMapMemory is how much memory all maps together may take when they grow, as a quantity of Kubernetes; empty is an
	// eighth of the memory of the machine, or of the limit of the process' cgroup.
	MaxMapMemory string `json:"maxMapMemory,omitempty"`
	// PreallocateMaps makes all maps as large as they may become, instead of having them grow.
	PreallocateMaps bool `json:"preallocateMaps,omitempty"`

	MaxFrontends uint32 `json:"maxFrontends,omitempty"`
	MaxServices  uint32 `json:"maxServices,omitempty"`
	MaxBackends  uint32 `json:"maxBackends,omitempty"`
	MaxSlots     uint32 `json:"maxSlots,omitempty"`
	MaxRanges    uint32 `json:"maxRanges,omitempty"`
	MaxLocals    uint32 `json:"maxLocals,omitempty"`
	MaxAffinity  uint32 `json:"maxAffinity,omitempty"`
	// MaxTCPFlows, MaxUDPFlows and MaxYoungFlows are derived from conntrack's limit and
	// the memory of the machine if they are 0.
	MaxTCPFlows   uint32 `json:"maxTCPFlows,omitempty"`
	MaxUDPFlows   uint32 `json:"maxUDPFlows,omitempty"`
	MaxYoungFlows uint32 `json:"maxYoungFlows,omitempty"`
	MaxUDPPeers   uint32 `json:"maxUDPPeers,omitempty"`
	MaxOptOuts    uint32 `json:"maxOptOuts,omitempty"`
}

// IPVSConfiguration holds the options of mode ipvs that upstream does not have.
type IPVSConfiguration struct {
	// UpstreamSemantics has virtual servers behave as upstream's where these differ
	// from other modes: all clients get the same endpoints, and if a Local policy
	// leaves none, all endpoints.
	UpstreamSemantics bool `json:"upstreamSemantics,omitempty"`
	// DrainTimeout is how long a removed TCP endpoint keeps its connections at most.
	DrainTimeout metav1.Duration `json:"drainTimeout,omitempty"`
}

// Which sockets are load-balanced.
const (
	SocketLBAll  = "all"  // of the host and of every pod
	SocketLBHost = "host" // of the host's network namespace only
)
