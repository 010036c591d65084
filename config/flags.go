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
	flagsEBPF    = "fast path (eBPF)"
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
	"ebpf-devices":                      TandemKind + ".ebpf.devices",
	"ebpf-pod-devices":                  TandemKind + ".ebpf.podDevices",
	"ebpf-node-port-range":              TandemKind + ".ebpf.nodePortRange",
	"ebpf-tcp-opening-timeout":          TandemKind + ".ebpf.tcpOpeningTimeout",
	"ebpf-tcp-closed-timeout":           TandemKind + ".ebpf.tcpClosedTimeout",
	"ebpf-max-ranges":                   TandemKind + ".ebpf.maxRanges",
	"ebpf-max-locals":                   TandemKind + ".ebpf.maxLocals",
	"ebpf-max-tcp-flows":                TandemKind + ".ebpf.maxTCPFlows",
	"ebpf-max-udp-flows":                TandemKind + ".ebpf.maxUDPFlows",
	"ebpf-max-young-flows":              TandemKind + ".ebpf.maxYoungFlows",
	"ebpf-max-frontends":                TandemKind + ".ebpf.maxFrontends",
	"ebpf-max-services":                 TandemKind + ".ebpf.maxServices",
	"ebpf-max-backends":                 TandemKind + ".ebpf.maxBackends",
	"ebpf-max-slots":                    TandemKind + ".ebpf.maxSlots",
	"ebpf-max-affinity":                 TandemKind + ".ebpf.maxAffinity",
	"ebpf-max-udp-peers":                TandemKind + ".ebpf.maxUDPPeers",
	"ebpf-max-opt-outs":                 TandemKind + ".ebpf.maxOptOuts",
}

// AddFlags binds flags to the fields. Names, defaults and meaning of those
// that upstream has are upstream's.
func (c *Config) AddFlags(sets *cliflag.NamedFlagSets) {
	k := &c.KubeProxy
	fs := sets.FlagSet(flagsGeneral)
	fs.StringVar((*string)(&k.Mode), "proxy-mode", string(k.Mode), "How Services are carried: 'ebpf', 'ipvs' or 'iptables', which is the default, as upstream. Given as a flag it wins over the file of --config, so that one ConfigMap serves this binary and upstream's.")
	fs.StringVar(&k.HostnameOverride, "hostname-override", k.HostnameOverride, "The name of this node; the host's name if empty. It wins over the file of --config.")
	fs.Var(cliflag.NewMapStringBool(&k.FeatureGates), "feature-gates", "A set of key=value pairs that turn features on and off.")
	fs.Int32Var(k.OOMScoreAdj, "oom-score-adj", *k.OOMScoreAdj, "The oom_score_adj of this process, from -1000 to 1000.")
	fs.BoolVar(&k.EnableProfiling, "profiling", k.EnableProfiling, "Serve profiles at /debug/pprof of the metrics server.")

	fs = sets.FlagSet(flagsAPI)
	fs.StringVar(&k.ClientConnection.Kubeconfig, "kubeconfig", k.ClientConnection.Kubeconfig, "Path of a kubeconfig file. Without it, --master and --manifests, the service account of the pod is used.")
	fs.Float32Var(&k.ClientConnection.QPS, "kube-api-qps", k.ClientConnection.QPS, "Requests per second to the API server.")
	fs.Int32Var(&k.ClientConnection.Burst, "kube-api-burst", k.ClientConnection.Burst, "Requests to the API server that may exceed --kube-api-qps for a moment.")
	fs.StringVar(&k.ClientConnection.ContentType, "kube-api-content-type", k.ClientConnection.ContentType, "Content type of requests to the API server.")
	fs.DurationVar(&k.ConfigSyncPeriod.Duration, "config-sync-period", k.ConfigSyncPeriod.Duration, "How often everything that is cached from the API server is looked at again. Must be greater than 0.")
	fs.StringVar(&c.Tandem.Manifests, "manifests", c.Tandem.Manifests, "A directory of YAML or JSON manifests (Services, EndpointSlices, ServiceCIDRs, the Node) that stands in for the API server and is watched for changes. It wins over the file of --config.")

	fs = sets.FlagSet(flagsServers)
	fs.Var(&ipVar{&k.BindAddress}, "bind-address", "The address of this node, where the one that its Node object says is not right. '0.0.0.0' and '::' only name a family. Its family is that of the default addresses below.")
	fs.Var(&hostPortVar{&k.HealthzBindAddress}, "healthz-bind-address", "Address and port of the health server, with /healthz and /livez.")
	fs.Var(&hostPortVar{&k.MetricsBindAddress}, "metrics-bind-address", "Address and port of the metrics server, with /metrics, /proxyMode and /configz, and with /debug/explain for this node alone.")
	c.healthzPort, c.metricsPort = HealthzPort, MetricsPort
	fs.Int32Var(&c.healthzPort, "healthz-port", c.healthzPort, "The port of --healthz-bind-address if that has none; 0 turns the health server off.")
	fs.Int32Var(&c.metricsPort, "metrics-port", c.metricsPort, "The port of --metrics-bind-address if that has none.")
	// They cannot fail: the flags are there.
	_ = fs.MarkDeprecated("healthz-port", "use --healthz-bind-address instead.")
	_ = fs.MarkDeprecated("metrics-port", "use --metrics-bind-address instead.")
	fs.BoolVar(&k.BindAddressHardFail, "bind-address-hard-fail", k.BindAddressHardFail, "Exit when an address cannot be bound, instead of trying again.")
	fs.StringVar(&k.ShowHiddenMetricsForVersion, "show-hidden-metrics-for-version", k.ShowHiddenMetricsForVersion, "The previous version, as <major>.<minor>, whose hidden metrics are to be shown.")

	fs = sets.FlagSet(flagsTraffic)
	fs.StringVar((*string)(&k.DetectLocalMode), "detect-local-mode", string(k.DetectLocalMode), "How pods are told from others: 'ClusterCIDR' (also if empty) and 'NodeCIDR' by their address, 'BridgeInterface' and 'InterfaceNamePrefix' by the device that their packets come in by.")
	fs.StringVar(&k.ClusterCIDR, "cluster-cidr", k.ClusterCIDR, "The addresses of pods, for --detect-local-mode=ClusterCIDR: a CIDR, or one of each family separated by a comma. Without it nobody is taken for a pod.")
	fs.StringVar(&k.DetectLocal.BridgeInterface, "pod-bridge-interface", k.DetectLocal.BridgeInterface, "The device, for --detect-local-mode=BridgeInterface.")
	fs.StringVar(&k.DetectLocal.InterfaceNamePrefix, "pod-interface-name-prefix", k.DetectLocal.InterfaceNamePrefix, "How the names of the devices begin, for --detect-local-mode=InterfaceNamePrefix.")
	fs.StringSliceVar(&k.NodePortAddresses, "nodeport-addresses", k.NodePortAddresses, "The addresses of this node at which NodePorts are served: CIDRs, and the words 'primary' (those of the Node object), 'localhost' and 'all'. All, if empty.")
	fs.Int32Var(k.IPTables.MasqueradeBit, "iptables-masquerade-bit", *k.IPTables.MasqueradeBit, "The bit of the packet mark that says that a packet is to be masqueraded, from 0 to 31.")
	fs.DurationVar(&k.IPTables.SyncPeriod.Duration, "iptables-sync-period", k.IPTables.SyncPeriod.Duration, "In mode iptables: the time after which all rules are compared, whether or not anything changed. Must be greater than 0.")
	fs.DurationVar(&k.IPTables.MinSyncPeriod.Duration, "iptables-min-sync-period", k.IPTables.MinSyncPeriod.Duration, "In mode iptables: the least time from one sync to the next; the first change of a quiet period does not wait.")
	fs.BoolVar(k.IPTables.LocalhostNodePorts, "iptables-localhost-nodeports", *k.IPTables.LocalhostNodePorts, "Serve NodePorts to this host at loopback addresses too, where --nodeport-addresses covers those. In mode ebpf as well, and there for both address families.")
	fs.BoolVar(&k.IPTables.MasqueradeAll, "masquerade-all", k.IPTables.MasqueradeAll, "Hide the source of everything that goes to a ClusterIP behind this node. In mode ebpf as well.")
	fs.BoolVar(&c.Tandem.StrictSourceRanges, "strict-source-ranges", c.Tandem.StrictSourceRanges, "Let loadBalancerSourceRanges that name one address family alone keep everybody out of the other one, which upstream leaves open. It wins over the file of --config.")

	fs = sets.FlagSet(flagsIPVS)
	v := &k.IPVS
	fs.StringVar(&v.Scheduler, "ipvs-scheduler", v.Scheduler, "How a virtual server chooses among endpoints: rr, which is the default, lc, sh, mh or another one that the kernel has.")
	fs.StringSliceVar(&v.ExcludeCIDRs, "ipvs-exclude-cidrs", v.ExcludeCIDRs, "CIDRs with virtual servers of somebody else, which are left alone.")
	fs.BoolVar(&v.StrictARP, "ipvs-strict-arp", v.StrictARP, "Answer ARP for an address only on the device that has it (arp_ignore, arp_announce).")
	fs.DurationVar(&v.SyncPeriod.Duration, "ipvs-sync-period", v.SyncPeriod.Duration, "The time after which everything is compared, whether or not anything changed. Must be greater than 0.")
	fs.DurationVar(&v.MinSyncPeriod.Duration, "ipvs-min-sync-period", v.MinSyncPeriod.Duration, "The least time from one sync to the next; the first change of a quiet period does not wait.")
	fs.DurationVar(&v.TCPTimeout.Duration, "ipvs-tcp-timeout", v.TCPTimeout.Duration, "How long the kernel remembers an idle TCP connection; 0 leaves that as it is.")
	fs.DurationVar(&v.TCPFinTimeout.Duration, "ipvs-tcpfin-timeout", v.TCPFinTimeout.Duration, "How long the kernel remembers a TCP connection that ends; 0 leaves that as it is.")
	fs.DurationVar(&v.UDPTimeout.Duration, "ipvs-udp-timeout", v.UDPTimeout.Duration, "How long the kernel remembers an idle UDP flow; 0 leaves that as it is.")
	fs.BoolVar(&c.Tandem.IPVS.UpstreamSemantics, "ipvs-upstream-semantics", c.Tandem.IPVS.UpstreamSemantics, "Do as upstream's mode ipvs where that differs from other modes: with a Local traffic policy, one set of endpoints for everybody, and all of them where it leaves none. It wins over the file of --config.")
	fs.DurationVar(&c.Tandem.IPVS.DrainTimeout.Duration, "ipvs-drain-timeout", c.Tandem.IPVS.DrainTimeout.Duration, "How long a TCP endpoint that is gone keeps its connections at most. It wins over the file of --config.")

	fs = sets.FlagSet(flagsTrack)
	ct := &k.Conntrack
	fs.Int32Var(ct.MaxPerCore, "conntrack-max-per-core", *ct.MaxPerCore, "How many connections netfilter tracks at most, for each CPU; 0 leaves the limit as it is.")
	fs.Int32Var(ct.Min, "conntrack-min", *ct.Min, "How many connections netfilter tracks at most, if --conntrack-max-per-core makes less.")
	fs.BoolVar(&ct.TCPBeLiberal, "conntrack-tcp-be-liberal", ct.TCPBeLiberal, "Have netfilter take packets outside of TCP windows for valid (nf_conntrack_tcp_be_liberal), and do not drop invalid ones.")
	fs.DurationVar(&ct.TCPEstablishedTimeout.Duration, "conntrack-tcp-timeout-established", ct.TCPEstablishedTimeout.Duration, "How long an idle TCP connection is remembered; 0 leaves netfilter's as it is. In mode ebpf it is that of connections from outside as well, as the next three are.")
	fs.DurationVar(&ct.TCPCloseWaitTimeout.Duration, "conntrack-tcp-timeout-close-wait", ct.TCPCloseWaitTimeout.Duration, "How long a TCP connection is remembered that one side has closed; 0 leaves netfilter's as it is.")
	fs.DurationVar(&ct.UDPTimeout.Duration, "conntrack-udp-timeout", ct.UDPTimeout.Duration, "How long an idle UDP flow is remembered that has packets of one way alone; 0 leaves netfilter's as it is.")
	fs.DurationVar(&ct.UDPStreamTimeout.Duration, "conntrack-udp-timeout-stream", ct.UDPStreamTimeout.Duration, "How long an idle UDP flow is remembered that has packets both ways; 0 leaves netfilter's as it is.")

	e := &c.Tandem.EBPF
	fs = sets.FlagSet(flagsEBPF)
	fs.StringVar(&e.CgroupRoot, "ebpf-cgroup-root", e.CgroupRoot, "The cgroup2 directory whose processes are served. Empty means the root of the hierarchy, found through the mount table.")
	fs.StringVar(&e.ProcRoot, "ebpf-proc-root", e.ProcRoot, "The proc file system in which the network namespaces of pods are found.")
	fs.DurationVar(&e.MinSyncPeriod.Duration, "ebpf-min-sync-period", e.MinSyncPeriod.Duration, "The least time from one sync to the next. Must be greater than 0.")
	fs.DurationVar(&e.SyncPeriod.Duration, "ebpf-sync-period", e.SyncPeriod.Duration, "The time after which everything in the kernel is compared, whether or not anything changed. Must be greater than 0.")
	fs.StringVar(&e.SocketLB, "ebpf-socket-lb", e.SocketLB, "Whose sockets are served: 'all', of the host and of pods, or 'host', of the host's network namespace only.")
	fs.StringSliceVar(&e.Fallback, "ebpf-fallback", e.Fallback, "The modes that stand in where the kernel cannot carry mode ebpf, in the order to try: 'ipvs', 'iptables'. Unless it is 'none', rules carry beside it what it cannot (SCTP, what does not fit into its maps). With 'none' the process fails instead.")
	fs.StringSliceVar(&e.Devices, "ebpf-devices", e.Devices, "The devices by which traffic for this node comes in: names, or beginnings of names with a + behind, as 'eth0,bond+'. Empty means those that have the node's address, a default route or another one with a gateway, and the tunnels of the CNI.")
	fs.StringSliceVar(&e.PodDevices, "ebpf-pod-devices", e.PodDevices, "Devices of pods, named as in --ebpf-devices, whose packets are served, as no socket of theirs is seen: of virtual machines, for one. Those of pods that opted out ('tandemctl optout') are found without.")
	fs.StringVar(&e.NodePortRange, "ebpf-node-port-range", e.NodePortRange, "The range that the API server allocates NodePorts from (its --service-node-port-range). Connections to backends on other nodes get no source port out of it.")
	fs.BoolVar(e.ProtectNodePorts, "ebpf-protect-node-ports", *e.ProtectNodePorts, "Keep processes of the host from binding NodePorts, where they would not get anything.")
	fs.BoolVar(e.ReserveNodePorts, "ebpf-reserve-node-ports", *e.ReserveNodePorts, "Add --ebpf-node-port-range to net.ipv4.ip_local_reserved_ports where the kernel would give out ports of it to connections of this host.")
	fs.BoolVar(&e.ResetRemovedBackends, "ebpf-reset-removed-backends", e.ResetRemovedBackends, "Answer clients outside this node, whose TCP backend the API does not know any more, by a reset. Otherwise their connections are left alone, as upstream does.")
	fs.DurationVar(&e.TCPOpeningTimeout.Duration, "ebpf-tcp-opening-timeout", e.TCPOpeningTimeout.Duration, "How long a connection from outside is remembered that is not established. Must be greater than 0.")
	fs.DurationVar(&e.TCPClosedTimeout.Duration, "ebpf-tcp-closed-timeout", e.TCPClosedTimeout.Duration, "How long a connection from outside is remembered that is over. Must be greater than 0.")
	fs.Uint32Var(&e.MaxFrontends, "ebpf-max-frontends", e.MaxFrontends, "Room for frontends: one for each address, port and protocol that clients dial.")
	fs.Uint32Var(&e.MaxServices, "ebpf-max-services", e.MaxServices, "Room for service ports.")
	fs.Uint32Var(&e.MaxBackends, "ebpf-max-backends", e.MaxBackends, "Room for backends: one for each endpoint that a service port uses.")
	fs.Uint32Var(&e.MaxSlots, "ebpf-max-slots", e.MaxSlots, "Room for places in backend sets. A set takes its size rounded up to a power of two, twice while it changes.")
	fs.Uint32Var(&e.MaxAffinity, "ebpf-max-affinity", e.MaxAffinity, "Clients that session affinity remembers; the longest unseen go first.")
	fs.Uint32Var(&e.MaxUDPPeers, "ebpf-max-udp-peers", e.MaxUDPPeers, "Service addresses remembered for unconnected UDP sockets that use more than one.")
	fs.Uint32Var(&e.MaxRanges, "ebpf-max-ranges", e.MaxRanges, "Room for source ranges of load balancer IPs.")
	fs.Uint32Var(&e.MaxLocals, "ebpf-max-locals", e.MaxLocals, "Room for addresses of this node's devices.")
	fs.Uint32Var(&e.MaxTCPFlows, "ebpf-max-tcp-flows", e.MaxTCPFlows, "Room for established TCP connections from outside, which no others push out.")
	fs.Uint32Var(&e.MaxUDPFlows, "ebpf-max-udp-flows", e.MaxUDPFlows, "Room for UDP flows from outside with packets both ways.")
	fs.Uint32Var(&e.MaxYoungFlows, "ebpf-max-young-flows", e.MaxYoungFlows, "Room for connections from outside that are not established, or are over; the oldest are forgotten first. Rounded up to a power of two.")
	fs.Uint32Var(&e.MaxOptOuts, "ebpf-max-opt-outs", e.MaxOptOuts, "Room for network namespaces whose sockets are left alone.")

	logsapi.AddFlags(&k.Logging, sets.FlagSet(flagsLogs))
}

// OverrideWithFlags takes over those flags that were given and win over a
// file, and returns the names of those that were given and do not.
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
				return // as a manifest says it that leaves it to the file
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

// winsOverFile says which flags count although --config is given: those that
// do upstream, and those that upstream does not have.
func winsOverFile(group, name string) bool {
	switch name {
	case "hostname-override", "proxy-mode", "manifests", "strict-source-ranges", "ipvs-upstream-semantics", "ipvs-drain-timeout":
		return true
	}
	return group == flagsEBPF || group == flagsLogs
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
