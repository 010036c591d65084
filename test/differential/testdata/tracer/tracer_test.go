// SPDX-License-Identifier: Apache-2.0

// hack/upstream.sh -tracer puts this file beside upstream's own tests of its iptables mode,
// and builds a program of them. It answers questions about the rules that upstream writes,
// with the proxier and the packet tracer of those tests. Questions and answers are lines of
// JSON; package differential has the other side.

package iptables

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/proxy"
	"k8s.io/kubernetes/pkg/proxy/conntrack"
	"k8s.io/kubernetes/pkg/proxy/metrics"
	proxyutil "k8s.io/kubernetes/pkg/proxy/util"
	proxyutiltest "k8s.io/kubernetes/pkg/proxy/util/testing"
	utiliptables "k8s.io/kubernetes/pkg/util/iptables"
	iptablestest "k8s.io/kubernetes/pkg/util/iptables/testing"
)

type tandemWorld struct {
	Services           []*v1.Service
	Slices             []*discovery.EndpointSlice
	Node               string
	NodeIPs            []string // at most one of each family
	Addresses          []string // of devices, loopback devices included
	Zone               string
	PodCIDRs           []string // at most one of each family
	PodInterface       string
	PodInterfacePrefix bool
	NodePortAddresses  []string // CIDRs
	LocalhostNodePorts bool
	MasqueradeAll      bool
	IgnoreExternalIPs  bool
}

type tandemPacket struct {
	Source, Destination string
	Port                uint16
	Protocol            string
}

// tandemFlow is a UDP entry of conntrack. Addresses have ports.
type tandemFlow struct {
	Source, Destination, Replies string
}

type tandemQuestion struct {
	World  *tandemWorld
	Packet *tandemPacket
	Flows  []tandemFlow // of one family
}

type tandemCheck struct {
	Port  uint16
	Local int
}

type tandemAnswer struct {
	// Of a world: rules by family, and health checks by family and name.
	Rules  map[v1.IPFamily]string                 `json:",omitempty"`
	Checks map[v1.IPFamily]map[string]tandemCheck `json:",omitempty"`
	// Of a packet.
	Outputs     []string `json:",omitempty"`
	Masquerades bool     `json:",omitempty"`

	// Of flows: whether upstream deletes them.
	Stale []bool `json:",omitempty"`

	Error string `json:",omitempty"`
}

// tandemNode has a proxier of each family.
type tandemNode struct {
	world    *tandemWorld
	tables   map[v1.IPFamily]*iptablestest.FakeIPTables
	proxiers map[v1.IPFamily]*Proxier
}

// tandemConntrack has UDP entries, and keeps those that are deleted.
type tandemConntrack struct {
	conntrack.Interface
	entries, deleted []*netlink.ConntrackFlow
}

func (c *tandemConntrack) ListEntries(uint8) ([]*netlink.ConntrackFlow, error) { return c.entries, nil }

func (c *tandemConntrack) DeleteEntries(_ uint8, flows []*netlink.ConntrackFlow) (int, error) {
	c.deleted = flows
	return len(flows), nil
}

// tandemHealth keeps what a proxier says about health checks.
type tandemHealth struct {
	services  map[types.NamespacedName]uint16
	endpoints map[types.NamespacedName]int
}

func (h *tandemHealth) SyncServices(services map[types.NamespacedName]uint16) error {
	h.services = maps.Clone(services)
	return nil
}

func (h *tandemHealth) SyncEndpoints(endpoints map[types.NamespacedName]int) error {
	h.endpoints = maps.Clone(endpoints)
	return nil
}

// tandemUnquoted finds comments of jumps from built-in chains, which are arguments of a command.
var tandemUnquoted = regexp.MustCompile(`--comment ([^"]+) (-[jm] )`)

func tandemFamily(text string) v1.IPFamily {
	if strings.Contains(text, ":") {
		return v1.IPv6Protocol
	}
	return v1.IPv4Protocol
}

func (n *tandemNode) learn(w *tandemWorld) (a tandemAnswer, err error) {
	n.world, n.tables, n.proxiers = w, map[v1.IPFamily]*iptablestest.FakeIPTables{}, map[v1.IPFamily]*Proxier{}
	a.Rules, a.Checks = map[v1.IPFamily]string{}, map[v1.IPFamily]map[string]tandemCheck{}
	if err := utilfeature.DefaultMutableFeatureGate.Set(fmt.Sprintf("AllowServiceExternalIPs=%t", !w.IgnoreExternalIPs)); err != nil {
		return a, err
	}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		ipt := iptablestest.NewFake()
		if family == v1.IPv6Protocol {
			ipt = iptablestest.NewIPv6Fake()
		}
		p, health := NewFakeProxier(ipt), &tandemHealth{}
		p.serviceHealthServer, p.logger = health, klog.Background()
		p.nodeName, p.nodeIP = w.Node, nil
		for _, text := range w.NodeIPs {
			if tandemFamily(text) == family {
				p.nodeIP = net.ParseIP(text)
			}
		}
		if p.nodeIP == nil { // as detectNodeIPs does
			p.nodeIP = map[v1.IPFamily]net.IP{v1.IPv4Protocol: net.IPv4(127, 0, 0, 1), v1.IPv6Protocol: net.IPv6loopback}[family]
		}
		p.serviceChanges = proxy.NewServiceChangeTracker(family, newServiceInfo, nil)
		p.endpointsChanges = proxy.NewEndpointsChangeTracker(family, w.Node, newEndpointInfo, nil)
		if p.topologyLabels = map[string]string{}; w.Zone != "" {
			p.topologyLabels[v1.LabelTopologyZone] = w.Zone
		}
		p.masqueradeAll, p.masqueradeMark = w.MasqueradeAll, "0x4000"
		p.nodePortAddresses = proxyutil.NewNodePortAddresses(family, w.NodePortAddresses)
		p.localhostNodePorts = w.LocalhostNodePorts && p.nodePortAddresses.ContainsIPv4Loopback()
		p.nfAcctCounters = map[string]bool{
			metrics.IPTablesCTStateInvalidDroppedNFAcctCounter: false,
			metrics.LocalhostNodePortAcceptedNFAcctCounter:     false,
		}
		network := proxyutiltest.NewFakeNetwork()
		var addresses []net.Addr
		for _, text := range w.Addresses {
			if tandemFamily(text) == family {
				addresses = append(addresses, &net.IPNet{IP: net.ParseIP(text), Mask: net.CIDRMask(128, 128)})
			}
		}
		network.AddInterfaceAddr(&net.Interface{Name: "eth0"}, addresses)
		p.networkInterfacer = network
		p.localDetector = proxyutil.NewNoOpLocalDetector()
		switch {
		case w.PodInterface != "" && w.PodInterfacePrefix:
			p.localDetector = proxyutil.NewDetectLocalByInterfaceNamePrefix(w.PodInterface)
		case w.PodInterface != "":
			p.localDetector = proxyutil.NewDetectLocalByBridgeInterface(w.PodInterface)
		}
		for _, cidr := range w.PodCIDRs {
			if tandemFamily(cidr) == family {
				p.localDetector = proxyutil.NewDetectLocalByCIDR(cidr)
			}
		}
		for _, s := range w.Services {
			p.OnServiceAdd(s)
		}
		for _, s := range w.Slices {
			if string(s.AddressType) == string(family) {
				p.OnEndpointSliceAdd(s)
			}
		}
		p.OnServiceSynced()
		p.OnEndpointSlicesSynced()
		if err := p.syncProxyRules(); err != nil {
			return a, err
		}
		n.tables[family], n.proxiers[family] = ipt, p
		var text strings.Builder
		for _, table := range ipt.Dump.Tables {
			fmt.Fprintf(&text, "*%s\n", table.Name)
			for _, chain := range table.Chains {
				fmt.Fprintf(&text, ":%s -\n", chain.Name)
			}
			for _, chain := range table.Chains {
				for _, rule := range chain.Rules {
					raw := rule.Raw
					if !strings.HasPrefix(string(chain.Name), "KUBE-") {
						raw = tandemUnquoted.ReplaceAllString(raw, `--comment "$1" $2`)
					}
					fmt.Fprintln(&text, raw)
				}
			}
			fmt.Fprintln(&text, "COMMIT")
		}
		a.Rules[family] = text.String()
		a.Checks[family] = map[string]tandemCheck{}
		for name, port := range health.services {
			a.Checks[family][name.String()] = tandemCheck{port, health.endpoints[name]}
		}
	}
	return a, nil
}

// trace does what tracePacket does, which cannot follow a translated packet of IPv6: it takes
// what is before the first colon for the address.
func (n *tandemNode) trace(t *testing.T, p *tandemPacket) (a tandemAnswer) {
	local := n.world.Addresses
	if ip := net.ParseIP(p.Destination); ip.IsLoopback() { // all of 127.0.0.0/8 is this host's
		local = append(slices.Clone(local), p.Destination)
	}
	tracer := newIPTablesTracer(t, n.tables[tandemFamily(p.Destination)], local)
	to, port := p.Destination, strconv.Itoa(int(p.Port))
	tracer.runChain(utiliptables.TableNAT, utiliptables.ChainPrerouting, p.Source, p.Protocol, to, port)
	if len(tracer.outputs) > 0 {
		if host, translated, err := net.SplitHostPort(tracer.outputs[0]); err == nil {
			to, port = host, translated
		}
	}
	for _, chain := range []utiliptables.Chain{kubeServicesChain, kubeExternalServicesChain, kubeNodePortsChain, kubeProxyFirewallChain} {
		tracer.runChain(utiliptables.TableFilter, chain, p.Source, p.Protocol, to, port)
	}
	return tandemAnswer{Outputs: slices.Clone(tracer.outputs), Masquerades: tracer.markMasq}
}

// stale asks which flows are deleted.
func (n *tandemNode) stale(flows []tandemFlow) (a tandemAnswer) {
	family, table := v1.IPv4Protocol, &tandemConntrack{}
	if strings.HasPrefix(flows[0].Destination, "[") {
		family = v1.IPv6Protocol
	}
	at := func(text string) (net.IP, uint16) {
		host, port, _ := net.SplitHostPort(text)
		number, _ := strconv.Atoi(port)
		return net.ParseIP(host), uint16(number)
	}
	for _, f := range flows {
		entry := &netlink.ConntrackFlow{}
		entry.Forward.Protocol, entry.Reverse.Protocol = unix.IPPROTO_UDP, unix.IPPROTO_UDP
		entry.Forward.SrcIP, entry.Forward.SrcPort = at(f.Source)
		entry.Forward.DstIP, entry.Forward.DstPort = at(f.Destination)
		entry.Reverse.SrcIP, entry.Reverse.SrcPort = at(f.Replies)
		entry.Reverse.DstIP, entry.Reverse.DstPort = at(f.Source)
		table.entries = append(table.entries, entry)
	}
	p := n.proxiers[family]
	conntrack.CleanStaleEntries(table, family, p.svcPortMap, p.endpointsMap)
	for _, entry := range table.entries {
		a.Stale = append(a.Stale, slices.Contains(table.deleted, entry))
	}
	return a
}

// TestTandemTracer answers questions until there are no more.
func TestTandemTracer(t *testing.T) {
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	var n tandemNode
	questions, answers := json.NewDecoder(bufio.NewReader(os.Stdin)), json.NewEncoder(os.Stdout)
	for {
		var q tandemQuestion
		if err := questions.Decode(&q); err == io.EOF {
			return
		} else if err != nil {
			t.Fatal(err)
		}
		a := tandemAnswer{Error: "the proxier or the tracer gave up"}
		t.Run("", func(t *testing.T) {
			var err error
			switch {
			case q.World != nil:
				a, err = n.learn(q.World)
			case n.world == nil:
				err = errors.New("a question without a world")
			case q.Flows != nil:
				a = n.stale(q.Flows)
			default:
				a = n.trace(t, q.Packet)
			}
			if err != nil {
				a.Error = err.Error()
			}
		})
		if err := answers.Encode(&a); err != nil {
			t.Fatal(err)
		}
	}
}
