// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation/field"
	cliflag "k8s.io/component-base/cli/flag"
	logsapi "k8s.io/component-base/logs/api/v1"
)

// The groups of flags, as --help shows them.
const (
	flagsGeneral = "general"
	flagsAPI     = "API server"
	flagsServers = "health and metrics"
	flagsTraffic = "traffic"
	flagsBeside  = "coexistence"
	flagsEBPF    = "eBPF"
	flagsIPVS    = "IPVS"
	flagsTrack   = "conntrack"
	flagsLogs    = "logs"
)

// fieldOf is the field that a flag sets, for the flags that can be wrong.
var fieldOf = map[string]string{
	"hostname-override":                 "hostnameOverride",
	"proxy-mode":                        "mode",
	"bind-address":                      "bindAddress",
	"healthz-bind-address":              "healthzBindAddress",
	"metrics-bind-address":              "metricsBindAddress",
	"config-sync-period":                "configSyncPeriod",
	"oom-score-adj":                     "oomScoreAdj",
	"show-hidden-metrics-for-version":   "showHiddenMetricsForVersion",
	"kubeconfig":                        "clientConnection.kubeconfig",
	"kube-api-burst":                    "clientConnection.burst",
	"cluster-cidr":                      "clusterCIDR",
	"detect-local-mode":                 "detectLocalMode",
	"pod-bridge-interface":              "detectLocal.bridgeInterface",
	"pod-interface-name-prefix":         "detectLocal.interfaceNamePrefix",
	"nodeport-addresses":                "nodePortAddresses",
	"feature-gates":                     "featureGates",
	"metrics-port":                      "metricsBindAddress",
	"conntrack-max-per-core":            "conntrack.maxPerCore",
	"conntrack-min":                     "conntrack.min",
	"conntrack-tcp-timeout-established": "conntrack.tcpEstablishedTimeout",
	"conntrack-tcp-timeout-close-wait":  "conntrack.tcpCloseWaitTimeout",
	"conntrack-udp-timeout":             "conntrack.udpTimeout",
	"conntrack-udp-timeout-stream":      "conntrack.udpStreamTimeout",
	"logging-format":                    "logging.format",
	"log-flush-frequency":               "logging.flushFrequency",
	"vmodule":                           "logging.vmodule",
	"manifests":                         TandemKind + ".manifests",
	"coexist":                           TandemKind + ".coexistence.preset",
	"coexist-frontends":                 TandemKind + ".coexistence.frontends",
	"coexist-clients":                   TandemKind + ".coexistence.clients",
	"take-over-delay":                   TandemKind + ".takeOverDelay",
	"state-dir":                         TandemKind + ".stateDirectory",
	"ebpf-min-sync-period":              TandemKind + ".ebpf.minSyncPeriod",
	"ebpf-sync-period":                  TandemKind + ".ebpf.syncPeriod",
	"ebpf-socket-lb":                    TandemKind + ".ebpf.socketLB",
	"ebpf-fallback":                     TandemKind + ".ebpf.fallback",
	"iptables-masquerade-bit":           "iptables.masqueradeBit",
	"iptables-sync-period":              "iptables.syncPeriod",
	"iptables-min-sync-period":          "iptables.minSyncPeriod",
	"ipvs-scheduler":                    "ipvs.scheduler",
	"ipvs-exclude-cidrs":                "ipvs.excludeCIDRs",
	"ipvs-sync-period":                  "ipvs.syncPeriod",
	"ipvs-min-sync-period":              "ipvs.minSyncPeriod",
	"ipvs-tcp-timeout":                  "ipvs.tcpTimeout",
	"ipvs-tcpfin-timeout":               "ipvs.tcpFinTimeout",
	"ipvs-udp-timeout":                  "ipvs.udpTimeout",
	"ipvs-drain-timeout":                TandemKind + ".ipvs.drainTimeout",
	"ready-max-api-age":                 TandemKind + ".readyMaxAPIAge",
	"host-port":                         TandemKind + ".hostPort",
	"ebpf-devices":                      TandemKind + ".ebpf.devices",
	"ebpf-pod-devices":                  TandemKind + ".ebpf.podDevices",
	"ebpf-node-port-range":              TandemKind + ".ebpf.nodePortRange",
	"ebpf-acceleration":                 TandemKind + ".ebpf.acceleration",
	"ebpf-tcp-opening-timeout":          TandemKind + ".ebpf.tcpOpeningTimeout",
	"ebpf-tcp-closed-timeout":           TandemKind + ".ebpf.tcpClosedTimeout",
	"ebpf-yield-grace-period":           TandemKind + ".ebpf.yieldGracePeriod",
	"ebpf-max-ranges":                   TandemKind + ".ebpf.maxRanges",
	"ebpf-max-locals":                   TandemKind + ".ebpf.maxLocals",
	"ebpf-max-tcp-flows":                TandemKind + ".ebpf.maxTCPFlows",
	"ebpf-max-udp-flows":                TandemKind + ".ebpf.maxUDPFlows",
	"ebpf-max-young-flows":              TandemKind + ".ebpf.maxYoungFlows",
	"ebpf-service-signals":              TandemKind + ".ebpf.serviceSignals",
	"ebpf-max-map-memory":               TandemKind + ".ebpf.maxMapMemory",
	"ebpf-preallocate-maps":             TandemKind + ".ebpf.preallocateMaps",
	"ebpf-max-frontends":                TandemKind + ".ebpf.maxFrontends",
	"ebpf-max-services":                 TandemKind + ".ebpf.maxServices",
	"ebpf-max-backends":                 TandemKind + ".ebpf.maxBackends",
	"ebpf-max-slots":                    TandemKind + ".ebpf.maxSlots",
	"ebpf-max-affinity":                 TandemKind + ".ebpf.maxAffinity",
	"ebpf-max-udp-peers":                TandemKind + ".ebpf.maxUDPPeers",
	"lb-algorithm":                      TandemKind + ".loadBalancer.algorithm",
	"maglev-table-size":                 TandemKind + ".loadBalancer.maglevTableSize",
	"maglev-seed":                       TandemKind + ".loadBalancer.maglevSeed",
	"lb-mode":                           TandemKind + ".loadBalancer.mode",
	"dsr-dispatch":                      TandemKind + ".loadBalancer.dsrDispatch",
	"dsr-source-cidr":                   TandemKind + ".loadBalancer.dsrSourceCIDR",
	"ebpf-max-opt-outs":                 TandemKind + ".ebpf.maxOptOuts",
}

// AddFlags binds flags to the fields. Names, defaults and meaning of those
// that upstream has are upstream's.
func (c *Config) AddFlags(sets *cliflag.NamedFlagSets) {
	k := &c.KubeProxy
	fs := sets.FlagSet(flagsGeneral)
	fs.StringVar((*string)(&k.Mode), "proxy-mode", string(k.Mode), "How Services are served: 'ebpf', 'ipvs' or 'iptables' (the default, as upstream). 'nftables' means 'iptables' with the nft variant of iptables. As a flag it takes precedence over the configuration file, so that one ConfigMap works for this binary and upstream's.")
	fs.StringVar(&k.HostnameOverride, "hostname-override", k.HostnameOverride, "Name of this node. Empty means the name of the host. Takes precedence over the configuration file.")
	fs.Var(cliflag.NewMapStringBool(&k.FeatureGates), "feature-gates", "Comma-separated key=value pairs that turn features on and off.")
	fs.Int32Var(k.OOMScoreAdj, "oom-score-adj", *k.OOMScoreAdj, "The oom_score_adj of this process, from -1000 to 1000.")
	fs.BoolVar(&k.EnableProfiling, "profiling", k.EnableProfiling, "Serve profiles at /debug/pprof of the metrics server.")

	fs = sets.FlagSet(flagsAPI)
	fs.StringVar(&k.ClientConnection.Kubeconfig, "kubeconfig", k.ClientConnection.Kubeconfig, "Path of a kubeconfig file. Without it, --master and --manifests, the service account of the pod is used.")
	fs.Float32Var(&k.ClientConnection.QPS, "kube-api-qps", k.ClientConnection.QPS, "Requests per second to the API server.")
	fs.Int32Var(&k.ClientConnection.Burst, "kube-api-burst", k.ClientConnection.Burst, "Requests to the API server that may briefly exceed --kube-api-qps.")
	fs.StringVar(&k.ClientConnection.ContentType, "kube-api-content-type", k.ClientConnection.ContentType, "Content type of requests to the API server.")
	fs.DurationVar(&k.ConfigSyncPeriod.Duration, "config-sync-period", k.ConfigSyncPeriod.Duration, "How often everything that is cached from the API server is processed again. Must be greater than 0.")
	fs.StringVar(&c.Tandem.Manifests, "manifests", c.Tandem.Manifests, "Directory of YAML or JSON manifests (Services, EndpointSlices, ServiceCIDRs, the Node) to use instead of an API server. Changes are watched. Takes precedence over the configuration file.")

	fs = sets.FlagSet(flagsServers)
	fs.Var(&ipVar{&k.BindAddress}, "bind-address", "IP address of this node, if the one in its Node object is wrong. '0.0.0.0' and '::' select the address family only. Determines the family of the default addresses below.")
	fs.Var(&hostPortVar{&k.HealthzBindAddress}, "healthz-bind-address", "Address and port of the health server, with /healthz and /livez.")
	fs.Var(&hostPortVar{&k.MetricsBindAddress}, "metrics-bind-address", "Address and port of the metrics server, with /metrics, /proxyMode and /configz, and with /debug/explain for clients on this node.")
	c.healthzPort, c.metricsPort = HealthzPort, MetricsPort
	fs.Int32Var(&c.healthzPort, "healthz-port", c.healthzPort, "Port of --healthz-bind-address if that has none. 0 disables the health server.")
	fs.Int32Var(&c.metricsPort, "metrics-port", c.metricsPort, "Port of --metrics-bind-address if that has none.")
	// They cannot fail: the flags are there.
	_ = fs.MarkDeprecated("healthz-port", "use --healthz-bind-address instead.")
	_ = fs.MarkDeprecated("metrics-port", "use --metrics-bind-address instead.")
	fs.BoolVar(&k.BindAddressHardFail, "bind-address-hard-fail", k.BindAddressHardFail, "Exit if a server cannot bind its address, instead of retrying.")
	fs.StringVar(&k.ShowHiddenMetricsForVersion, "show-hidden-metrics-for-version", k.ShowHiddenMetricsForVersion, "Previous version, as <major>.<minor>, whose hidden metrics are shown.")

	fs = sets.FlagSet(flagsTraffic)
	fs.StringVar((*string)(&k.DetectLocalMode), "detect-local-mode", string(k.DetectLocalMode), "How traffic of pods is detected: 'ClusterCIDR' (also if empty) and 'NodeCIDR' by source address, 'BridgeInterface' and 'InterfaceNamePrefix' by the device that packets arrive on.")
	fs.StringVar(&k.ClusterCIDR, "cluster-cidr", k.ClusterCIDR, "CIDR of pods for --detect-local-mode=ClusterCIDR, or one of each address family separated by a comma. If empty, no traffic is taken for that of pods.")
	fs.StringVar(&k.DetectLocal.BridgeInterface, "pod-bridge-interface", k.DetectLocal.BridgeInterface, "Name of the bridge for --detect-local-mode=BridgeInterface.")
	fs.StringVar(&k.DetectLocal.InterfaceNamePrefix, "pod-interface-name-prefix", k.DetectLocal.InterfaceNamePrefix, "Prefix of device names for --detect-local-mode=InterfaceNamePrefix.")
	fs.StringSliceVar(&k.NodePortAddresses, "nodeport-addresses", k.NodePortAddresses, "Addresses of this node at which NodePorts are served: CIDRs, or the words 'primary' (addresses of the Node object), 'localhost' and 'all'. Empty means all.")
	fs.Int32Var(k.IPTables.MasqueradeBit, "iptables-masquerade-bit", *k.IPTables.MasqueradeBit, "Bit of the packet mark that requests masquerading, from 0 to 31.")
	fs.DurationVar(&k.IPTables.SyncPeriod.Duration, "iptables-sync-period", k.IPTables.SyncPeriod.Duration, "In mode iptables: how often all rules are compared with the kernel, even if nothing changed. Must be greater than 0.")
	fs.DurationVar(&k.IPTables.MinSyncPeriod.Duration, "iptables-min-sync-period", k.IPTables.MinSyncPeriod.Duration, "In mode iptables: minimum time between two syncs. The first change after a quiet period is applied at once.")
	fs.BoolVar(k.IPTables.LocalhostNodePorts, "iptables-localhost-nodeports", *k.IPTables.LocalhostNodePorts, "Serve NodePorts at loopback addresses too, for clients on this host, if --nodeport-addresses includes those. Also applies to mode ebpf, there for both address families.")
	fs.BoolVar(&k.IPTables.MasqueradeAll, "masquerade-all", k.IPTables.MasqueradeAll, "Masquerade all traffic to ClusterIPs. Also applies to mode ebpf.")
	fs.BoolVar(&c.Tandem.StrictSourceRanges, "strict-source-ranges", c.Tandem.StrictSourceRanges, "If loadBalancerSourceRanges name one address family only, deny all clients of the other one; upstream allows them. Takes precedence over the configuration file.")
	fs.DurationVar(&c.Tandem.ReadyMaxAPIAge.Duration, "ready-max-api-age", c.Tandem.ReadyMaxAPIAge.Duration, "/readyz fails if the API server has sent no event or bookmark for a watched resource for this long; bookmarks come each minute. At least 2m. 0 means never: what was programmed keeps working. Takes precedence over the configuration file.")
	fs.BoolVar(&c.Tandem.HostPort, "host-port", c.Tandem.HostPort, "Serve the hostPorts of the pods of this node, beside the portmap plugin of the CNI or instead of it. Needs permission to list and watch Pods. Takes precedence over the configuration file.")
	lb := &c.Tandem.LoadBalancer
	fs.StringVar(&lb.Algorithm, "lb-algorithm", lb.Algorithm, "Algorithm of Services whose annotations name none: 'random', or 'maglev', with which all nodes send a connection from outside to the same endpoint, and few connections to another one when endpoints change. Takes precedence over the configuration file.")
	fs.Uint32Var(&lb.MaglevTableSize, "maglev-table-size", lb.MaglevTableSize, "Slots of each Maglev table: 251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521 or 131071. 0 means the smallest with 100 slots for each endpoint. Takes precedence over the configuration file.")
	fs.Uint32Var(&lb.MaglevSeed, "maglev-seed", lb.MaglevSeed, "Seed of Maglev's hash, the same on all nodes. Takes precedence over the configuration file.")
	fs.StringVar(&lb.Mode, "lb-mode", lb.Mode, "How mode ebpf sends packets of clients outside to endpoints on other nodes, for Services whose annotations do not say: 'snat' masquerades them; with 'dsr' (direct server return), endpoints see the client's address and their nodes answer it, where these run this kube-proxy too; 'hybrid' is dsr for TCP and snat for UDP. Takes precedence over the configuration file.")
	fs.StringVar(&lb.DSRDispatch, "dsr-dispatch", lb.DSRDispatch, "In what nodes send packets of direct server return to each other: 'ipip' (IP in IP, protocols 4 and 41), 'geneve' (UDP port 6081), for networks that pass only TCP, UDP and ICMP, or 'opt' (IP options), for those that pass options and no such packets. Nodes take any. Takes precedence over the configuration file.")
	fs.StringVar(&lb.DSRSourceCIDR, "dsr-source-cidr", lb.DSRSourceCIDR, "CIDR, or one of each family separated by a comma, of source addresses over which IP in IP of direct server return spreads connections, so that network cards spread them over their queues. The same on all nodes, and used for nothing else. Empty means the node's own address. Takes precedence over the configuration file.")
	fs.StringVar(&c.Tandem.StateDirectory, "state-dir", c.Tandem.StateDirectory, "Directory in which tandemctl keeps which backends are drained or quarantined on this node. It need not exist. They outlive a restart of the pod if it is a directory of the host. Takes precedence over the configuration file.")

	fs = sets.FlagSet(flagsIPVS)
	v := &k.IPVS
	fs.StringVar(&v.Scheduler, "ipvs-scheduler", v.Scheduler, "IPVS scheduler: rr (the default), lc, sh, mh or any other that the kernel has.")
	fs.StringSliceVar(&v.ExcludeCIDRs, "ipvs-exclude-cidrs", v.ExcludeCIDRs, "CIDRs whose virtual servers are managed by others and left alone.")
	fs.BoolVar(&v.StrictARP, "ipvs-strict-arp", v.StrictARP, "Answer ARP requests for an address only on the device that has it (arp_ignore, arp_announce).")
	fs.DurationVar(&v.SyncPeriod.Duration, "ipvs-sync-period", v.SyncPeriod.Duration, "How often everything is compared with the kernel, even if nothing changed. Must be greater than 0.")
	fs.DurationVar(&v.MinSyncPeriod.Duration, "ipvs-min-sync-period", v.MinSyncPeriod.Duration, "Minimum time between two syncs. The first change after a quiet period is applied at once.")
	fs.DurationVar(&v.TCPTimeout.Duration, "ipvs-tcp-timeout", v.TCPTimeout.Duration, "IPVS timeout of idle TCP connections. 0 keeps the kernel's value.")
	fs.DurationVar(&v.TCPFinTimeout.Duration, "ipvs-tcpfin-timeout", v.TCPFinTimeout.Duration, "IPVS timeout of TCP connections after a FIN. 0 keeps the kernel's value.")
	fs.DurationVar(&v.UDPTimeout.Duration, "ipvs-udp-timeout", v.UDPTimeout.Duration, "IPVS timeout of idle UDP flows. 0 keeps the kernel's value.")
	fs.BoolVar(&c.Tandem.IPVS.UpstreamSemantics, "ipvs-upstream-semantics", c.Tandem.IPVS.UpstreamSemantics, "Behave as upstream's mode ipvs where it differs from other modes: with a Local traffic policy, all clients get the same endpoints, and if no endpoint is local, all of them. Takes precedence over the configuration file.")
	fs.DurationVar(&c.Tandem.IPVS.DrainTimeout.Duration, "ipvs-drain-timeout", c.Tandem.IPVS.DrainTimeout.Duration, "How long a removed TCP endpoint keeps its connections at most. Takes precedence over the configuration file.")

	fs = sets.FlagSet(flagsTrack)
	ct := &k.Conntrack
	fs.Int32Var(ct.MaxPerCore, "conntrack-max-per-core", *ct.MaxPerCore, "Maximum number of connections that netfilter tracks, per CPU. 0 keeps the kernel's limit.")
	fs.Int32Var(ct.Min, "conntrack-min", *ct.Min, "Lower bound of the limit that --conntrack-max-per-core results in.")
	fs.BoolVar(&ct.TCPBeLiberal, "conntrack-tcp-be-liberal", ct.TCPBeLiberal, "Have netfilter accept packets outside of TCP windows (nf_conntrack_tcp_be_liberal), and do not drop packets in state INVALID.")
	fs.DurationVar(&ct.TCPEstablishedTimeout.Duration, "conntrack-tcp-timeout-established", ct.TCPEstablishedTimeout.Duration, "Timeout of idle TCP connections. 0 keeps netfilter's value. This and the next three also apply to connections from outside in mode ebpf.")
	fs.DurationVar(&ct.TCPCloseWaitTimeout.Duration, "conntrack-tcp-timeout-close-wait", ct.TCPCloseWaitTimeout.Duration, "Timeout of TCP connections in state CLOSE_WAIT, which one side has closed. 0 keeps netfilter's value.")
	fs.DurationVar(&ct.UDPTimeout.Duration, "conntrack-udp-timeout", ct.UDPTimeout.Duration, "Timeout of idle UDP flows without replies. 0 keeps netfilter's value.")
	fs.DurationVar(&ct.UDPStreamTimeout.Duration, "conntrack-udp-timeout-stream", ct.UDPStreamTimeout.Duration, "Timeout of idle UDP flows with packets in both directions. 0 keeps netfilter's value.")

	x := &c.Tandem.Coexistence
	fs = sets.FlagSet(flagsBeside)
	fs.StringVar(&x.Preset, "coexist", x.Preset, "Serve a part of the traffic in mode ebpf, beside another kube-proxy that stays on this node and serves the rest: 'socket-lb' for connections of processes on this node, 'north-south' for packets of clients outside. This proxy then writes no rules and no kernel settings.")
	fs.StringSliceVar(&x.Frontends, "coexist-frontends", x.Frontends, "Kinds of frontends to serve beside another kube-proxy: ClusterIP, LoadBalancer, ExternalIP, NodePort, HostPort. Empty means all, if --coexist or --coexist-clients is set.")
	fs.StringSliceVar(&x.Clients, "coexist-clients", x.Clients, "Clients to serve beside another kube-proxy: 'pods' and 'host' of this node, and 'external'. Empty means those of --coexist; all, if only --coexist-frontends is set.")
	fs.DurationVar(&c.Tandem.TakeOverDelay.Duration, "take-over-delay", c.Tandem.TakeOverDelay.Duration, "Without coexistence: how long to wait at the start for another kube-proxy on this node to end, before taking over. Must be greater than 0.")

	e := &c.Tandem.EBPF
	fs = sets.FlagSet(flagsEBPF)
	fs.StringVar(&e.CgroupRoot, "ebpf-cgroup-root", e.CgroupRoot, "cgroup2 directory whose processes are served. Empty means the root of the hierarchy, as found in the mount table.")
	fs.StringVar(&e.ProcRoot, "ebpf-proc-root", e.ProcRoot, "proc file system in which the network namespaces of pods are found.")
	fs.DurationVar(&e.MinSyncPeriod.Duration, "ebpf-min-sync-period", e.MinSyncPeriod.Duration, "Minimum time between two syncs. Must be greater than 0.")
	fs.DurationVar(&e.SyncPeriod.Duration, "ebpf-sync-period", e.SyncPeriod.Duration, "How often everything is compared with the kernel, even if nothing changed. Must be greater than 0.")
	fs.StringVar(&e.SocketLB, "ebpf-socket-lb", e.SocketLB, "Which sockets are load-balanced at connect(): 'all' for those of the host and of pods, 'host' for those in the host's network namespace only.")
	fs.StringSliceVar(&e.Fallback, "ebpf-fallback", e.Fallback, "Modes to run if the kernel does not support mode ebpf, in order of preference: 'ipvs', 'iptables'. Unless it is 'none', iptables rules also serve what eBPF cannot (SCTP, Services that do not fit into its maps). With 'none' the process fails if mode ebpf cannot run, nothing serves what eBPF cannot, and rules that another kube-proxy left are removed.")
	fs.StringSliceVar(&e.Devices, "ebpf-devices", e.Devices, "Devices that receive traffic for this node: names, or name prefixes followed by a +, such as 'eth0,bond+'. Empty means devices with the node's address or a route with a gateway, network cards, bonds, VLANs and veths with the address of a network, and tunnels of the CNI.")
	fs.StringSliceVar(&e.PodDevices, "ebpf-pod-devices", e.PodDevices, "Devices of pods whose traffic is load-balanced by packet, because their sockets cannot be (virtual machines, for example). Same format as --ebpf-devices. Found automatically: devices of pods that opted out ('tandemctl optout'), and those by which untranslated packets for Services come in.")
	fs.StringVar(&e.NodePortRange, "ebpf-node-port-range", e.NodePortRange, "Range that the API server allocates NodePorts from (its --service-node-port-range). It is not used for source ports of connections to backends on other nodes.")
	fs.BoolVar(e.ProtectNodePorts, "ebpf-protect-node-ports", *e.ProtectNodePorts, "Keep processes of the host from binding NodePorts, at which they would receive no traffic.")
	fs.BoolVar(&e.ServiceSignals, "ebpf-service-signals", e.ServiceSignals, "Count what TCP connections of sockets of this node to each Service came to, and measure how long they took to be established, their round-trip times and bytes, for the metrics tandem_service_*. Needs --ebpf-tcp-peer-names.")
	fs.BoolVar(e.TCPPeerNames, "ebpf-tcp-peer-names", *e.TCPPeerNames, "Let getpeername() show TCP clients the Service's address, as it does with UDP. With false they see the endpoint's, and connect() costs less.")
	fs.BoolVar(e.ReserveNodePorts, "ebpf-reserve-node-ports", *e.ReserveNodePorts, "Add --ebpf-node-port-range to net.ipv4.ip_local_reserved_ports if it overlaps with the ephemeral ports of this host.")
	fs.StringVar(&e.Acceleration, "ebpf-acceleration", e.Acceleration, "Forward packets between clients outside and endpoints on other nodes by XDP, in the driver of the uplink, of established connections and of those that open by direct server return: 'disabled', 'best-effort' where the driver can, or 'native', which reports an error where it cannot. Other packets are served as without it.")
	fs.BoolVar(&e.IgnoreHostFilters, "ebpf-ignore-host-filters", e.IgnoreHostFilters, "Serve clients outside this node by programs also where rules of the host filter packets before DNAT (preDNAT policies of Calico, drops in the tables raw and mangle), or where its firewall forwards only connections that netfilter translates. Otherwise, rules serve the frontends that this concerns.")
	fs.BoolVar(&e.MasqueradeLocalBackends, "ebpf-masquerade-local-backends", e.MasqueradeLocalBackends, "Masquerade clients outside this node also towards backends on this node, where externalTrafficPolicy is Cluster. iptables rules serve these connections. For network policies that match the node's address.")
	fs.BoolVar(&e.ResetRemovedBackends, "ebpf-reset-removed-backends", e.ResetRemovedBackends, "Send a TCP reset to clients outside this node whose backend was removed from the API. Otherwise their connections are left alone, as upstream does.")
	fs.DurationVar(&e.TCPOpeningTimeout.Duration, "ebpf-tcp-opening-timeout", e.TCPOpeningTimeout.Duration, "Timeout of TCP connections from outside that are not established yet. Must be greater than 0.")
	fs.DurationVar(&e.TCPClosedTimeout.Duration, "ebpf-tcp-closed-timeout", e.TCPClosedTimeout.Duration, "Timeout of TCP connections from outside that are closed. Must be greater than 0.")
	fs.DurationVar(&e.YieldGracePeriod.Duration, "ebpf-yield-grace-period", e.YieldGracePeriod.Duration, "How long another kube-proxy must hold the health and metrics ports, while this one does not run, before the eBPF programs yield new connections to it: at least 2s. 0 means never.")
	fs.StringVar(&e.MaxMapMemory, "ebpf-max-map-memory", e.MaxMapMemory, "Memory that all maps together may take when they grow, such as 64Mi. What does not fit is served by rules. Empty means an eighth of the memory of this machine, or of the limit of the process' cgroup.")
	fs.BoolVar(&e.PreallocateMaps, "ebpf-preallocate-maps", e.PreallocateMaps, "Make all maps as large as they may become (--ebpf-max-*), instead of having them start small and grow.")
	fs.Uint32Var(&e.MaxFrontends, "ebpf-max-frontends", e.MaxFrontends, "Maximum number of frontends: one for each address, port and protocol that clients connect to.")
	fs.Uint32Var(&e.MaxServices, "ebpf-max-services", e.MaxServices, "Maximum number of service ports.")
	fs.Uint32Var(&e.MaxBackends, "ebpf-max-backends", e.MaxBackends, "Maximum number of backends: one for each endpoint of a service port.")
	fs.Uint32Var(&e.MaxSlots, "ebpf-max-slots", e.MaxSlots, "Maximum number of slots in backend sets. A set takes its size rounded up to a power of two, and twice that while it changes.")
	fs.Uint32Var(&e.MaxAffinity, "ebpf-max-affinity", e.MaxAffinity, "Maximum number of clients with session affinity. The least recently seen are evicted.")
	fs.Uint32Var(&e.MaxUDPPeers, "ebpf-max-udp-peers", e.MaxUDPPeers, "Maximum number of Service addresses that are remembered for unconnected UDP sockets with more than one.")
	fs.Uint32Var(&e.MaxRanges, "ebpf-max-ranges", e.MaxRanges, "Maximum number of load balancer source ranges.")
	fs.Uint32Var(&e.MaxLocals, "ebpf-max-locals", e.MaxLocals, "Maximum number of addresses on devices of this node.")
	fs.Uint32Var(&e.MaxTCPFlows, "ebpf-max-tcp-flows", e.MaxTCPFlows, "Maximum number of established TCP connections from outside. They are never evicted. 0 derives this and the next two from conntrack's limit and the memory of the machine.")
	fs.Uint32Var(&e.MaxUDPFlows, "ebpf-max-udp-flows", e.MaxUDPFlows, "Maximum number of UDP flows from outside with packets in both directions.")
	fs.Uint32Var(&e.MaxYoungFlows, "ebpf-max-young-flows", e.MaxYoungFlows, "Maximum number of connections from outside that are not established yet, or are closed. The oldest are evicted. Rounded up to a power of two.")
	fs.Uint32Var(&e.MaxOptOuts, "ebpf-max-opt-outs", e.MaxOptOuts, "Maximum number of network namespaces that opted out of socket load balancing.")

	logsapi.AddFlags(&k.Logging, sets.FlagSet(flagsLogs))
}

// OverrideWithFlags applies the given flags that take precedence over a file,
// and returns the names of the others.
func (c *Config) OverrideWithFlags(given *pflag.FlagSet) (ignored []string, err error) {
	var sets cliflag.NamedFlagSets
	c.AddFlags(&sets)
	vmodule := c.KubeProxy.Logging.VModule
	c.KubeProxy.Logging.VModule = nil
	var errs []error
	for _, group := range sets.Order {
		fs := sets.FlagSets[group]
		fs.VisitAll(func(f *pflag.Flag) {
			if !given.Changed(f.Name) {
				return
			}
			if !winsOverFile(group, f.Name) {
				ignored = append(ignored, "--"+f.Name)
				return
			}
			if value := given.Lookup(f.Name).Value.String(); value == "" && (f.Name == "proxy-mode" || f.Name == "hostname-override") {
				return // a manifest with an empty variable leaves it to the file
			}
			if err := copyFlag(fs, f, given.Lookup(f.Name).Value); err != nil {
				errs = append(errs, err)
			}
			c.setByFlag(f.Name)
		})
	}
	// The first pattern that matches counts.
	c.KubeProxy.Logging.VModule = append(c.KubeProxy.Logging.VModule, vmodule...)
	slices.Sort(ignored)
	return ignored, errors.Join(errs...)
}

// copyFlag sets a flag to the value that another has.
func copyFlag(fs *pflag.FlagSet, to *pflag.Flag, from pflag.Value) error {
	list, ok := from.(pflag.SliceValue)
	if !ok {
		return fs.Set(to.Name, from.String())
	}
	// A list as text is not what would be parsed again.
	if err := to.Value.(pflag.SliceValue).Replace(list.GetSlice()); err != nil {
		return fmt.Errorf("--%s: %w", to.Name, err)
	}
	return nil
}

// CompleteFromFlags fills in what depends on other flags, where there is no
// file: the default addresses of the servers are of the family of
// --bind-address.
func (c *Config) CompleteFromFlags(given *pflag.FlagSet) {
	given.Visit(func(f *pflag.Flag) { c.setByFlag(f.Name) })
	k := &c.KubeProxy
	for _, server := range []struct {
		flag    string
		address *string
		port    int32
	}{{"healthz", &k.HealthzBindAddress, c.healthzPort}, {"metrics", &k.MetricsBindAddress, c.metricsPort}} {
		switch {
		case !given.Changed(server.flag + "-bind-address"):
			*server.address = ""
		case *server.address != "" && server.port != 0:
			*server.address = withPort(*server.address, "", int(server.port))
		}
	}
	c.setAddressDefaults()
	c.setModeDefaults()
	if k.Mode == ModeNFTables { // there are no flags for its section
		k.NFTables.MasqueradeAll = k.IPTables.MasqueradeAll
		k.NFTables.SyncPeriod, k.NFTables.MinSyncPeriod = k.IPTables.SyncPeriod, k.IPTables.MinSyncPeriod
	}
}

// DropServers turns the servers off whose deprecated flag for the port is 0. That
// is no field: what is written to a file has the addresses.
func (c *Config) DropServers() {
	if c.healthzPort == 0 {
		c.KubeProxy.HealthzBindAddress, c.noHealthz = "", true
	}
	if c.metricsPort == 0 {
		c.KubeProxy.MetricsBindAddress = "" // which does not validate
	}
}

func (c *Config) setByFlag(name string) {
	if at, ok := fieldOf[name]; ok {
		if c.origin == nil {
			c.origin = map[string]string{}
		}
		c.origin[at] = "--" + name
	}
}

// winsOverFile says which flags take precedence over the file of --config: those that
// do upstream, and those that upstream does not have.
func winsOverFile(group, name string) bool {
	switch name {
	case "hostname-override", "proxy-mode", "manifests", "strict-source-ranges", "host-port", "ready-max-api-age", "lb-algorithm", "maglev-table-size", "maglev-seed", "state-dir", "ipvs-upstream-semantics", "ipvs-drain-timeout":
		return true
	}
	return group == flagsEBPF || group == flagsBeside || group == flagsLogs
}

// Explain makes one error of many, each with where the value comes from: file
// and line, or flag.
func (c *Config) Explain(list field.ErrorList) error {
	errs := make([]error, 0, len(list))
	for _, e := range list {
		origin := c.origin[e.Field]
		if list, _, of := strings.Cut(e.Field, "["); of && origin == "" {
			origin = c.origin[list] // its elements have the flag's
		}
		if by := c.origin["detectLocalMode"]; origin == "" && strings.HasPrefix(e.Field, "detectLocal.") && !strings.HasPrefix(by, "--") {
			origin = by // what is missing has no line
		}
		switch {
		case strings.HasPrefix(origin, "--"):
			errs = append(errs, fmt.Errorf("%s: %s", origin, e.ErrorBody()))
		case origin != "":
			errs = append(errs, fmt.Errorf("%s: %w", origin, e))
		default:
			errs = append(errs, e)
		}
	}
	return errors.Join(errs...)
}

// Origin is where a field's value comes from: file and line, a flag, or empty
// for a default. The path is as in Validate.
func (c *Config) Origin(path string) string { return c.origin[path] }

// ipVar is an IP address.
type ipVar struct{ value *string }

func (v *ipVar) String() string {
	if v.value == nil {
		return ""
	}
	return *v.value
}

// Set leaves the address as it is if the text is empty, as upstream does.
func (v *ipVar) Set(text string) error {
	if text != "" {
		*v.value = text
	}
	return nil
}

func (v *ipVar) Type() string { return "ip" }

// hostPortVar is an address that may leave out the port.
type hostPortVar struct{ value *string }

func (v *hostPortVar) String() string {
	if v.value == nil {
		return ""
	}
	return *v.value
}

// Set takes empty text for the default, as upstream does whatever its help
// says: these servers cannot be turned off by it.
func (v *hostPortVar) Set(text string) error {
	*v.value = text
	return nil
}

func (v *hostPortVar) Type() string { return "ipport" }
