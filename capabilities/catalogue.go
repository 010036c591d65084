// SPDX-License-Identifier: Apache-2.0

package capabilities

import "slices"

// Mode names a proxy mode, in the words of kube-proxy's --proxy-mode.
type Mode string

// The modes Select knows.
const (
	ModeEBPF     Mode = "ebpf"
	ModeIPVS     Mode = "ipvs"
	ModeIPTables Mode = "iptables"
)

// Every feature that can be probed.
const (
	BPFSyscall   Feature = "bpf_syscall"
	OpenByID     Feature = "open_by_id"
	BTF          Feature = "btf"
	JIT          Feature = "jit"
	BPFFS        Feature = "bpffs"
	LockdownOpen Feature = "lockdown_open"

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
	RingBuf         Feature = "ringbuf"
	TCX             Feature = "tcx"
	Clsact          Feature = "clsact"
	Atomics         Feature = "atomics"
	RedirectNeigh   Feature = "redirect_neigh"
	FIBLookup       Feature = "fib_lookup"
	FIBSkipNeigh    Feature = "fib_skip_neigh"
	FIBSource       Feature = "fib_source"
	ConntrackLookup Feature = "ct_lookup"
	ConntrackNAT    Feature = "ct_nat"
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
	// NeededBy names the tier and the part of it that uses the feature.
	NeededBy string
	// Since is the first kernel with the feature, or "-" when the kernel's
	// version does not matter. It is a hint for people: probes never look at it.
	Since string
	// Without says what a node lacking the feature gives up.
	Without string
	// RequiredBy lists the modes that cannot run without the feature.
	RequiredBy []Mode
	// OptionalFor lists the modes that run without it, but worse.
	OptionalFor []Mode
	// Substitutes names a better feature this one stands in for: its absence
	// costs nothing where the better one is there.
	Substitutes Feature
	// Config is the kernel option behind the feature, for required features
	// that a kernel of the right age can still lack.
	Config string
	// Remedy says what an operator can do, when another kernel is not all.
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
		Without: "no eBPF at all", RequiredBy: onlyEBPF,
		Remedy: "use a kernel with CONFIG_BPF_SYSCALL and run with CAP_BPF and CAP_NET_ADMIN (a privileged container has both)"},
	{Feature: OpenByID, Description: "opening maps and programs by their id", NeededBy: "ebpf: what the process before left", Since: "4.13",
		Without: "a process could not find what the one before left", RequiredBy: onlyEBPF,
		Remedy: "run kernel 4.13 or newer with CAP_SYS_ADMIN (a privileged container has it; CAP_BPF does not suffice)"},
	{Feature: BTF, Description: "the kernel's own type information", NeededBy: "ebpf: kernel conntrack", Since: "5.4",
		Without: "flows of a previous kube-proxy cannot be recognised", OptionalFor: onlyEBPF,
		Remedy: "use a kernel with CONFIG_DEBUG_INFO_BTF"},
	{Feature: JIT, Description: "BPF programs compiled to machine code", NeededBy: "ebpf: everything", Since: "-",
		Without: "programs are interpreted, several times slower", OptionalFor: onlyEBPF,
		Remedy: "sysctl net.core.bpf_jit_enable=1"},
	{Feature: BPFFS, Description: "a bpf filesystem", NeededBy: "ebpf: pins for inspection", Since: "4.4",
		Without: "maps are found by id instead of by path"},
	{Feature: LockdownOpen, Description: "kernel lockdown not in confidentiality mode", NeededBy: "ebpf: tracing and inspection", Since: "-",
		Without: "programs cannot read kernel memory; the datapath does not"},

	{Feature: Cgroup2Root, Description: "a mounted cgroup v2 hierarchy", NeededBy: "ebpf: socket LB", Since: "4.5",
		Without: "no socket LB", RequiredBy: onlyEBPF, Remedy: cgroupMount},
	{Feature: CgroupReplace, Description: "swapping an attached cgroup program in place", NeededBy: "ebpf: upgrade", Since: "5.6",
		Without: "for a moment old and new programs both run during an upgrade", OptionalFor: onlyEBPF},
	{Feature: Connect4, Description: "cgroup hook at connect(), IPv4", NeededBy: "ebpf: socket LB", Since: "4.17",
		Without: "no socket LB", RequiredBy: onlyEBPF, Config: "CONFIG_CGROUP_BPF"},
	{Feature: Connect6, Description: "cgroup hook at connect(), IPv6", NeededBy: "ebpf: socket LB", Since: "4.17",
		Without: "no socket LB for AF_INET6 sockets", RequiredBy: onlyEBPF, Config: "CONFIG_CGROUP_BPF"},
	{Feature: Sendmsg4, Description: "cgroup hook at sendmsg() of unconnected UDP, IPv4", NeededBy: "ebpf: socket LB, UDP", Since: "4.18",
		Without: "no socket LB for unconnected UDP (DNS)", RequiredBy: onlyEBPF, Config: "CONFIG_CGROUP_BPF"},
	{Feature: Sendmsg6, Description: "cgroup hook at sendmsg() of unconnected UDP, IPv6", NeededBy: "ebpf: socket LB, UDP", Since: "4.18",
		Without: "no socket LB for unconnected UDP (DNS)", RequiredBy: onlyEBPF, Config: "CONFIG_CGROUP_BPF"},
	{Feature: Recvmsg4, Description: "cgroup hook at recvmsg() of unconnected UDP, IPv4", NeededBy: "ebpf: socket LB, UDP", Since: "5.2",
		Without: "UDP replies show the backend's address", RequiredBy: onlyEBPF, Config: "CONFIG_CGROUP_BPF"},
	{Feature: Recvmsg6, Description: "cgroup hook at recvmsg() of unconnected UDP, IPv6", NeededBy: "ebpf: socket LB, UDP", Since: "5.2",
		Without: "UDP replies show the backend's address", RequiredBy: onlyEBPF, Config: "CONFIG_CGROUP_BPF"},
	{Feature: Getpeername4, Description: "cgroup hook at getpeername(), IPv4", NeededBy: "ebpf: socket LB", Since: "5.8",
		Without: "getpeername() shows the backend, not the service", OptionalFor: onlyEBPF},
	{Feature: Getpeername6, Description: "cgroup hook at getpeername(), IPv6", NeededBy: "ebpf: socket LB", Since: "5.8",
		Without: "getpeername() shows the backend, not the service", OptionalFor: onlyEBPF},
	{Feature: PostBind4, Description: "cgroup hook after bind(), IPv4", NeededBy: "ebpf: NodePort protection", Since: "4.17",
		Without: "host processes can bind a NodePort", OptionalFor: onlyEBPF},
	{Feature: PostBind6, Description: "cgroup hook after bind(), IPv6", NeededBy: "ebpf: NodePort protection", Since: "4.17",
		Without: "host processes can bind a NodePort", OptionalFor: onlyEBPF},
	{Feature: NetnsCookie, Description: "bpf_get_netns_cookie in sock_addr programs", NeededBy: "ebpf: socket LB", Since: "5.7",
		Without: "host and pod sockets cannot be told apart", RequiredBy: onlyEBPF, Config: "CONFIG_CGROUP_BPF"},
	{Feature: SocketStorage, Description: "socket-local storage in sock_addr programs", NeededBy: "ebpf: socket LB, reverse mapping", Since: "5.3",
		Without: "the reverse mapping would outlive its socket", RequiredBy: onlyEBPF, Config: "CONFIG_CGROUP_BPF and CONFIG_BPF_SYSCALL"},
	{Feature: GlobalPointers, Description: "pointers as arguments of global functions", NeededBy: "ebpf: everything", Since: "5.12",
		Without: "no program could be verified", RequiredBy: onlyEBPF},
	{Feature: SetRetval, Description: "bpf_set_retval in sock_addr programs", NeededBy: "ebpf: socket LB, services without backends", Since: "6.1",
		Without: "connections to a service without backends are sent to a closed local port: still refused, but slower", OptionalFor: onlyEBPF},
	{Feature: KtimeCoarse, Description: "bpf_ktime_get_coarse_ns in sock_addr programs", NeededBy: "ebpf: NodePort and LoadBalancer traffic", Since: "5.11",
		Without: "no packet is translated by programs: clients outside this node are left to rules", OptionalFor: onlyEBPF},

	{Feature: MmapArray, Description: "array maps that user space can mmap", NeededBy: "ebpf: backend sets", Since: "5.5",
		Without: "a backend set cannot be published with one store", RequiredBy: onlyEBPF, Config: "CONFIG_BPF_SYSCALL and CONFIG_MMU"},
	{Feature: Batch, Description: "batched map operations", NeededBy: "ebpf: map updates", Since: "5.6",
		Without: "large syncs are about three times slower", OptionalFor: onlyEBPF},
	{Feature: RingBuf, Description: "ring buffer maps", NeededBy: "ebpf: monitor", Since: "5.8",
		Without: "no live events for the monitor", OptionalFor: onlyEBPF},

	{Feature: TCX, Description: "tcx attachments", NeededBy: "ebpf: NodePort and LoadBalancer traffic", Since: "6.6",
		Without: "clsact filters are used: lost when a device changes namespace, and ordered by priority with the CNI's", OptionalFor: onlyEBPF},
	{Feature: Clsact, Description: "clsact qdisc with BPF filters", NeededBy: "ebpf: NodePort and LoadBalancer traffic", Since: "4.5",
		Without: "without tcx either, traffic from outside the node needs another tier", OptionalFor: onlyEBPF, Substitutes: TCX},
	{Feature: Atomics, Description: "atomic compare and exchange in programs", NeededBy: "ebpf: NodePort and LoadBalancer traffic", Since: "5.12",
		Without: "no packet is translated by programs: clients outside this node are left to rules", OptionalFor: onlyEBPF},
	{Feature: RedirectNeigh, Description: "bpf_redirect_neigh in tc programs", NeededBy: "ebpf: remote backends", Since: "5.10",
		Without: "no packet is translated by programs: clients outside this node are left to rules", OptionalFor: onlyEBPF},
	{Feature: FIBLookup, Description: "bpf_fib_lookup in tc programs", NeededBy: "ebpf: remote backends", Since: "4.18",
		Without: "no packet is translated by programs: clients outside this node are left to rules", OptionalFor: onlyEBPF},
	{Feature: FIBSkipNeigh, Description: "BPF_FIB_LOOKUP_SKIP_NEIGH", NeededBy: "ebpf: remote backends", Since: "6.3",
		Without: "first packets to a new neighbour take a second path", OptionalFor: onlyEBPF},
	{Feature: FIBSource, Description: "BPF_FIB_LOOKUP_SRC", NeededBy: "ebpf: SNAT", Since: "6.7",
		Without: "the node address is used as SNAT source on every route", OptionalFor: onlyEBPF},
	{Feature: ConntrackLookup, Description: "kfunc bpf_skb_ct_lookup", NeededBy: "ebpf: take-over", Since: "5.18",
		Without: "flows of a previous kube-proxy cannot be recognised", OptionalFor: onlyEBPF},
	{Feature: ConntrackNAT, Description: "kfunc bpf_ct_set_nat_info", NeededBy: "ebpf: kernel conntrack mode", Since: "6.1",
		Without: "the kernel's conntrack cannot do the NAT; the own flow table does"},
	{Feature: XDPGeneric, Description: "XDP programs", NeededBy: "ebpf: XDP", Since: "4.12",
		Without: "no XDP acceleration"},
	{Feature: XDPNative, Description: "XDP in the device's driver", NeededBy: "ebpf: XDP", Since: "4.8",
		Without: "no XDP acceleration on this device"},

	{Feature: IPVS, Description: "IP virtual server", NeededBy: "ipvs: everything", Since: "-",
		Without: "no ipvs mode", RequiredBy: onlyIPVS, Remedy: "modprobe ip_vs, or use a kernel with CONFIG_IP_VS"},
	{Feature: IPVSSchedulers, Description: "IPVS round robin scheduler", NeededBy: "ipvs: virtual servers", Since: "-",
		Without: "no default scheduler", RequiredBy: onlyIPVS, Remedy: "modprobe ip_vs_rr, or use a kernel with CONFIG_IP_VS_RR"},
	{Feature: IPSet, Description: "IP sets", NeededBy: "ipvs: masquerade and source ranges", Since: "-",
		Without: "no ipvs mode", RequiredBy: onlyIPVS, Remedy: "modprobe ip_set, or use a kernel with CONFIG_IP_SET"},
	{Feature: IPTables, Description: "a usable iptables, of either variant", NeededBy: "iptables, ipvs: rules", Since: "-",
		Without: "no iptables or ipvs mode", RequiredBy: netfilters, Remedy: "install iptables, and a kernel with nf_tables or ip_tables"},
	{Feature: IPTablesNFT, Description: "iptables on nf_tables", NeededBy: "iptables: rules", Since: "-",
		Without: "the legacy variant is used"},
	{Feature: IPTablesLegacy, Description: "iptables on ip_tables", NeededBy: "iptables: rules", Since: "-",
		Without: "the nft variant is used"},
	{Feature: Conntrack, Description: "connection tracking", NeededBy: "iptables, ipvs: NAT", Since: "-",
		Without: "no NAT by netfilter", RequiredBy: netfilters, Remedy: "modprobe nf_conntrack"},
	{Feature: InetDiagDestroy, Description: "destroying sockets through sock_diag", NeededBy: "all: stale UDP sockets", Since: "4.9",
		Without: "connected UDP sockets keep sending to removed backends", OptionalFor: everyMode,
		Remedy: "use a kernel with CONFIG_INET_DIAG_DESTROY"},
}

// Catalogue returns what is known about every feature, in report order.
func Catalogue() []Info { return slices.Clone(catalogue) }

// Describe returns what is known about f, which may carry a device.
func Describe(f Feature) (Info, bool) {
	base := f.Base()
	for _, info := range catalogue {
		if info.Feature == base {
			return info, true
		}
	}
	return Info{}, false
}
