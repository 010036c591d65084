// SPDX-License-Identifier: Apache-2.0

package capabilities

// Mode names a proxy mode, in the words of kube-proxy's --proxy-mode.
type Mode string

// The modes that Select can choose.
const (
	ModeEBPF     Mode = "ebpf"
	ModeIPVS     Mode = "ipvs"
	ModeIPTables Mode = "iptables"
)

// Every feature that can be probed.
const (
	BPFSyscall Feature = "bpf_syscall"
	OpenByID   Feature = "open_by_id"
	BTF        Feature = "btf"
	JIT        Feature = "jit"

	Cgroup2Root     Feature = "cgroup2_root"
	CgroupReplace   Feature = "cgroup_replace"
	Connect4        Feature = "connect4"
	Connect6        Feature = "connect6"
	Sendmsg4        Feature = "sendmsg4"
	Sendmsg6        Feature = "sendmsg6"
	Recvmsg4        Feature = "recvmsg4"
	Recvmsg6        Feature = "recvmsg6"
	Getpeername4    Feature = "getpeername4"
	Getpeername6    Feature = "getpeername6"
	PostBind4       Feature = "post_bind4"
	PostBind6       Feature = "post_bind6"
	NetnsCookie     Feature = "netns_cookie"
	SocketStorage   Feature = "socket_storage"
	GlobalPointers  Feature = "global_pointers"
	SetRetval       Feature = "set_retval"
	KtimeCoarse     Feature = "ktime_coarse"
	MmapArray       Feature = "mmap_array"
	Batch           Feature = "batch"
	TCX             Feature = "tcx"
	Clsact          Feature = "clsact"
	Atomics         Feature = "atomics"
	RedirectNeigh   Feature = "redirect_neigh"
	FIBLookup       Feature = "fib_lookup"
	FIBSource       Feature = "fib_source"
	Loop            Feature = "loop"
	ConntrackLookup Feature = "ct_lookup"
	NetfilterHook   Feature = "netfilter_hook"
	XDPGeneric      Feature = "xdp_generic"
	XDPNative       Feature = "xdp_native" // always with a device

	IPVS            Feature = "ipvs"
	IPVSSchedulers  Feature = "ipvs_schedulers"
	IPSet           Feature = "ipset"
	IPTables        Feature = "iptables"
	IPTablesNFT     Feature = "iptables_nft"
	IPTablesLegacy  Feature = "iptables_legacy"
	Conntrack       Feature = "conntrack"
	InetDiagDestroy Feature = "inet_diag_destroy"
)

// Info is what is known about a feature without asking the kernel.
type Info struct {
	Feature     Feature
	Description string
	// NeededBy names the datapath and the part of it that uses the feature.
	NeededBy string
	// Since is the first Linux version with the feature, or "-" if the version does
	// not matter. It is for people to read: probes never look at it.
	Since string
	// Without is the effect on a node that lacks the feature.
	Without string
	// RequiredBy lists the modes that cannot run without the feature.
	RequiredBy []Mode
	// OptionalFor lists the modes that run without it, with limitations.
	OptionalFor []Mode
	// Substitutes names a better feature that this one replaces: its absence
	// has no effect where the better one is available.
	Substitutes Feature
	// Config is the kernel option behind the feature, for required features
	// that a kernel of a sufficient version can still lack.
	Config string
	// Remedy says what an operator can do other than running a newer kernel.
	Remedy string
}

var (
	onlyEBPF    = []Mode{ModeEBPF}
	onlyIPVS    = []Mode{ModeIPVS}
	netfilters  = []Mode{ModeIPVS, ModeIPTables}
	everyMode   = []Mode{ModeEBPF, ModeIPVS, ModeIPTables}
	cgroupMount = "mount one (mount -t cgroup2 none /sys/fs/cgroup/unified) or pass --ebpf-cgroup-root"
)

// catalogue is in the order people read it: the BPF base, the socket layer,
// maps, packets, then netfilter.
var catalogue = []Info{
	{Feature: BPFSyscall, Description: "the bpf() system call, creating a map", NeededBy: "ebpf: everything", Since: "3.19",
		Without: "eBPF is not available", RequiredBy: onlyEBPF,
		Remedy: "use a kernel with CONFIG_BPF_SYSCALL and run with CAP_BPF and CAP_NET_ADMIN (a privileged container has both)"},
	{Feature: OpenByID, Description: "opening maps and programs by id", NeededBy: "ebpf: restart and upgrade", Since: "4.13",
		Without: "a restarted process cannot find the maps and programs of the one before", RequiredBy: onlyEBPF,
		Remedy: "run Linux 4.13 or newer with CAP_SYS_ADMIN (a privileged container has it; CAP_BPF is not sufficient)"},
	{Feature: BTF, Description: "type information of the kernel (BTF)", NeededBy: "ebpf: migration from another mode", Since: "5.4",
		Without: "connections of a previous kube-proxy cannot be detected", OptionalFor: onlyEBPF,
		Remedy: "use a kernel with CONFIG_DEBUG_INFO_BTF"},
	{Feature: JIT, Description: "JIT compilation of BPF programs", NeededBy: "ebpf: everything", Since: "-",
		Without: "programs are interpreted, which is several times slower", OptionalFor: onlyEBPF,
		Remedy: "sysctl net.core.bpf_jit_enable=1"},

	{Feature: Cgroup2Root, Description: "a mounted cgroup v2 hierarchy", NeededBy: "ebpf: socket load balancing", Since: "4.5",
		Without: "no socket load balancing", RequiredBy: onlyEBPF, Remedy: cgroupMount},
	{Feature: CgroupReplace, Description: "replacing an attached cgroup program atomically", NeededBy: "ebpf: upgrade", Since: "5.6",
		Without: "during an upgrade, old and new programs both run for a moment", OptionalFor: onlyEBPF},
	{Feature: Connect4, Description: "cgroup hook at connect(), IPv4", NeededBy: "ebpf: socket load balancing", Since: "4.17",
		Without: "no socket load balancing", RequiredBy: onlyEBPF, Config: "CONFIG_CGROUP_BPF"},
	{Feature: Connect6, Description: "cgroup hook at connect(), IPv6", NeededBy: "ebpf: socket load balancing", Since: "4.17",
		Without: "no socket load balancing for AF_INET6 sockets", RequiredBy: onlyEBPF, Config: "CONFIG_CGROUP_BPF"},
	{Feature: Sendmsg4, Description: "cgroup hook at sendmsg() of unconnected UDP, IPv4", NeededBy: "ebpf: socket load balancing, UDP", Since: "4.18",
		Without: "no socket load balancing for unconnected UDP (DNS)", RequiredBy: onlyEBPF, Config: "CONFIG_CGROUP_BPF"},
	{Feature: Sendmsg6, Description: "cgroup hook at sendmsg() of unconnected UDP, IPv6", NeededBy: "ebpf: socket load balancing, UDP", Since: "4.18",
		Without: "no socket load balancing for unconnected UDP (DNS)", RequiredBy: onlyEBPF, Config: "CONFIG_CGROUP_BPF"},
	{Feature: Recvmsg4, Description: "cgroup hook at recvmsg() of unconnected UDP, IPv4", NeededBy: "ebpf: socket load balancing, UDP", Since: "5.2",
		Without: "UDP replies have the backend's address as their source", RequiredBy: onlyEBPF, Config: "CONFIG_CGROUP_BPF"},
	{Feature: Recvmsg6, Description: "cgroup hook at recvmsg() of unconnected UDP, IPv6", NeededBy: "ebpf: socket load balancing, UDP", Since: "5.2",
		Without: "UDP replies have the backend's address as their source", RequiredBy: onlyEBPF, Config: "CONFIG_CGROUP_BPF"},
	{Feature: Getpeername4, Description: "cgroup hook at getpeername(), IPv4", NeededBy: "ebpf: socket load balancing", Since: "5.8",
		Without: "getpeername() returns the backend's address, not the Service's", OptionalFor: onlyEBPF},
	{Feature: Getpeername6, Description: "cgroup hook at getpeername(), IPv6", NeededBy: "ebpf: socket load balancing", Since: "5.8",
		Without: "getpeername() returns the backend's address, not the Service's", OptionalFor: onlyEBPF},
	{Feature: PostBind4, Description: "cgroup hook after bind(), IPv4", NeededBy: "ebpf: NodePort protection", Since: "4.17",
		Without: "processes of the host can bind NodePorts", OptionalFor: onlyEBPF},
	{Feature: PostBind6, Description: "cgroup hook after bind(), IPv6", NeededBy: "ebpf: NodePort protection", Since: "4.17",
		Without: "processes of the host can bind NodePorts", OptionalFor: onlyEBPF},
	{Feature: NetnsCookie, Description: "bpf_get_netns_cookie in sock_addr programs", NeededBy: "ebpf: socket load balancing", Since: "5.7",
		Without: "sockets of the host and of pods cannot be distinguished", RequiredBy: onlyEBPF, Config: "CONFIG_CGROUP_BPF"},
	{Feature: SocketStorage, Description: "socket-local storage in sock_addr programs", NeededBy: "ebpf: socket load balancing, reverse mapping", Since: "5.3",
		Without: "the reverse mapping of addresses would outlive its socket", RequiredBy: onlyEBPF, Config: "CONFIG_CGROUP_BPF and CONFIG_BPF_SYSCALL"},
	{Feature: GlobalPointers, Description: "pointers as arguments of global functions", NeededBy: "ebpf: everything", Since: "5.12",
		Without: "the programs do not pass the verifier", RequiredBy: onlyEBPF},
	{Feature: SetRetval, Description: "bpf_set_retval in sock_addr programs", NeededBy: "ebpf: socket load balancing, Services without endpoints", Since: "6.1",
		Without: "connections to a Service without endpoints are redirected to a closed local port: they are still refused, but later", OptionalFor: onlyEBPF},
	{Feature: KtimeCoarse, Description: "bpf_ktime_get_coarse_ns in sock_addr programs", NeededBy: "ebpf: NodePort and LoadBalancer traffic", Since: "5.11",
		Without: "programs cannot translate packets: iptables rules serve clients outside this node", OptionalFor: onlyEBPF},

	{Feature: MmapArray, Description: "memory-mapped array maps", NeededBy: "ebpf: backend sets", Since: "5.5",
		Without: "a backend set cannot be replaced atomically", RequiredBy: onlyEBPF, Config: "CONFIG_BPF_SYSCALL and CONFIG_MMU"},
	{Feature: Batch, Description: "batched map operations", NeededBy: "ebpf: map updates", Since: "5.6",
		Without: "large syncs take about three times as long", OptionalFor: onlyEBPF},

	{Feature: TCX, Description: "tcx attachments", NeededBy: "ebpf: NodePort and LoadBalancer traffic", Since: "6.6",
		Without: "clsact filters are used: they are lost if a device changes its namespace, and share priorities with the CNI's filters", OptionalFor: onlyEBPF},
	{Feature: Clsact, Description: "clsact qdisc with BPF filters", NeededBy: "ebpf: NodePort and LoadBalancer traffic", Since: "4.5",
		Without: "if tcx is missing too, iptables rules serve clients outside this node", OptionalFor: onlyEBPF, Substitutes: TCX},
	{Feature: Atomics, Description: "atomic compare and exchange in programs", NeededBy: "ebpf: NodePort and LoadBalancer traffic", Since: "5.12",
		Without: "programs cannot translate packets: iptables rules serve clients outside this node", OptionalFor: onlyEBPF},
	{Feature: RedirectNeigh, Description: "bpf_redirect_neigh in tc programs", NeededBy: "ebpf: remote backends", Since: "5.10",
		Without: "programs cannot translate packets: iptables rules serve clients outside this node", OptionalFor: onlyEBPF},
	{Feature: FIBLookup, Description: "bpf_fib_lookup in tc programs", NeededBy: "ebpf: remote backends", Since: "4.18",
		Without: "programs cannot translate packets: iptables rules serve clients outside this node", OptionalFor: onlyEBPF},
	{Feature: FIBSource, Description: "BPF_FIB_LOOKUP_SRC", NeededBy: "ebpf: SNAT", Since: "6.7",
		Without: "the SNAT source is an address of the uplink, whatever the route prefers", OptionalFor: onlyEBPF},
	{Feature: Loop, Description: "bpf_loop in tc programs", NeededBy: "ebpf: SNAT", Since: "5.17",
		Without: "where most source ports towards a backend are in use, fewer of the rest are tried", OptionalFor: onlyEBPF},
	{Feature: ConntrackLookup, Description: "kfunc bpf_skb_ct_lookup", NeededBy: "ebpf: migration from another mode", Since: "5.18",
		Without: "connections of a previous kube-proxy cannot be detected", OptionalFor: onlyEBPF},
	{Feature: NetfilterHook, Description: "netfilter programs", NeededBy: "ebpf: packets that its other programs miss", Since: "6.4",
		Without: "where others remove programs from a device, connections may be reset until they are attached again", OptionalFor: onlyEBPF},
	{Feature: XDPGeneric, Description: "XDP programs", NeededBy: "ebpf: XDP", Since: "4.12",
		Without: "no XDP acceleration"},
	{Feature: XDPNative, Description: "XDP in the device's driver", NeededBy: "ebpf: XDP", Since: "4.8",
		Without: "no XDP acceleration on this device"},

	{Feature: IPVS, Description: "IP virtual server", NeededBy: "ipvs: everything", Since: "-",
		Without: "mode ipvs is not available", RequiredBy: onlyIPVS, Remedy: "modprobe ip_vs, or use a kernel with CONFIG_IP_VS"},
	{Feature: IPVSSchedulers, Description: "IPVS round robin scheduler", NeededBy: "ipvs: virtual servers", Since: "-",
		Without: "the default scheduler is not available", RequiredBy: onlyIPVS, Remedy: "modprobe ip_vs_rr, or use a kernel with CONFIG_IP_VS_RR"},
	{Feature: IPSet, Description: "IP sets", NeededBy: "ipvs: masquerade and source ranges", Since: "-",
		Without: "mode ipvs is not available", RequiredBy: onlyIPVS, Remedy: "modprobe ip_set, or use a kernel with CONFIG_IP_SET"},
	{Feature: IPTables, Description: "usable iptables tools (nft or legacy variant)", NeededBy: "iptables, ipvs: rules", Since: "-",
		Without: "modes iptables and ipvs are not available", RequiredBy: netfilters, Remedy: "install iptables, and use a kernel with nf_tables or ip_tables"},
	{Feature: IPTablesNFT, Description: "iptables (nf_tables)", NeededBy: "iptables: rules", Since: "-",
		Without: "the legacy variant is used"},
	{Feature: IPTablesLegacy, Description: "iptables (legacy)", NeededBy: "iptables: rules", Since: "-",
		Without: "the nft variant is used"},
	{Feature: Conntrack, Description: "connection tracking", NeededBy: "iptables, ipvs: NAT", Since: "-",
		Without: "netfilter cannot translate addresses", RequiredBy: netfilters, Remedy: "modprobe nf_conntrack"},
	{Feature: InetDiagDestroy, Description: "closing sockets through sock_diag", NeededBy: "all modes: stale UDP sockets", Since: "4.9",
		Without: "connected UDP sockets keep sending to removed endpoints", OptionalFor: everyMode,
		Remedy: "use a kernel with CONFIG_INET_DIAG_DESTROY"},
}

// Describe returns the description of f, which may include a device.
func Describe(f Feature) (Info, bool) {
	base := f.Base()
	for _, info := range catalogue {
		if info.Feature == base {
			return info, true
		}
	}
	return Info{}, false
}
