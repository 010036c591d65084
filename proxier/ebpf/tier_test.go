// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"net/netip"
	"os"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/removal"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	listenIfAsked()
	os.Exit(m.Run())
}

// Service addresses of these tests. Endpoints are pods of the lab.
var (
	vip4 = netip.MustParseAddr("10.96.0.10")
	vip6 = netip.MustParseAddr("fd00:10:96::10")
)

const targetPort = 8080

// node is a lab node on which the tier runs.
type node struct {
	*proxier.Proxier
	lab  *lab.Lab
	at   *lab.Node
	tier *Tier
}

// openOn opens the tier in the node's network namespace, as a process there would.
func openOn(t testing.TB, n *lab.Node, opts Options) (tier *Tier, err error) {
	t.Helper()
	kernel.NeedsPrograms(t)
	opts.CgroupRoot = n.CgroupPath()
	if opts.Sizes == (lbmap.Sizes{}) {
		opts.Sizes = lbmap.Sizes{Frontends: 1 << 12, Services: 1 << 10, Backends: 1 << 12, Slots: 1 << 13, Affinity: 1 << 10, UDPPeers: 1 << 10, OptOuts: 16,
			TCPFlows: 1 << 13, UDPFlows: 1 << 13, YoungFlows: 1 << 13}
	}
	disableMissing(&opts)
	err = n.Do(func() error {
		tier, err = Open(context.Background(), opts)
		return err
	})
	return tier, err
}

// disableMissing turns off features that this kernel lacks, as the process does after its probes.
func disableMissing(opts *Options) {
	report := kernel.Report()
	opts.NoSetRetval = opts.NoSetRetval || !kernel.Has(capabilities.SetRetval)
	opts.NoGetpeername = opts.NoGetpeername || !kernel.Has(capabilities.Getpeername4)
	opts.NoFIBSource = opts.NoFIBSource || !kernel.Has(capabilities.FIBSource)
	opts.NoConntrack = opts.NoConntrack || report.State(capabilities.ConntrackLookup) == capabilities.No
	opts.NoLoop = opts.NoLoop || !kernel.Has(capabilities.Loop)
	opts.NoHold = opts.NoHold || !kernel.Has(capabilities.NetfilterHook)
	opts.Left[proxier.FromOutside] = opts.Left[proxier.FromOutside] || !kernel.Has(capabilities.KtimeCoarse) || !kernel.Has(capabilities.Atomics)
	if !kernel.Has(capabilities.TCX) {
		opts.TC = tc.Clsact
	}
}

func cleanupOn(n *lab.Node) error {
	return n.Do(func() error {
		_, err := removal.Cleanup(context.Background(), n.CgroupPath())
		return err
	})
}

// uplinksOf returns the uplinks of a node.
func uplinksOf(t testing.TB, n *lab.Node) []devices.Device {
	t.Helper()
	found, err := devices.New(devices.Options{NodeIPs: []netip.Addr{n.Addr4, n.Addr6}, In: n.Do}).List()
	if err != nil || len(found.Devices) == 0 {
		t.Fatalf("uplinks of %s: %v, %v", n.Name, found.Devices, err)
	}
	return found.Devices
}

func newNode(t testing.TB, at *lab.Node, l *lab.Lab, opts Options) *node {
	t.Helper()
	n := &node{lab: l, at: at}
	t.Cleanup(func() {
		n.close()
		if err := cleanupOn(at); err != nil {
			t.Error(err)
		}
	})
	n.start(t, opts)
	return n
}

// start starts a process on the node.
func (n *node) start(t testing.TB, opts Options) {
	t.Helper()
	tier, err := openOn(t, n.at, opts)
	if err != nil {
		t.Fatal(err)
	}
	n.tier = tier
	p, err := proxier.New(proxier.Options{NodeName: n.at.Name, Tier: tier, Runner: proxier.DefaultRunnerOptions()})
	if err != nil {
		t.Fatal(err)
	}
	n.Proxier = p
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
}

// close ends the process. Its kernel state stays.
func (n *node) close() {
	if n.tier != nil {
		n.tier.Close()
		n.tier = nil
	}
}

func (n *node) sync(t testing.TB) {
	t.Helper()
	if err := n.Sync(context.Background()); err != nil {
		t.Fatalf("sync: %v", err)
	}
}

// dualService returns a dual-stack Service with port 80 over TCP and UDP.
func dualService(mutate ...func(*v1.Service)) *v1.Service {
	s := writertest.Service("web", vip4.String(), mutate...)
	s.Spec.ClusterIPs = []string{vip4.String(), vip6.String()}
	s.Spec.Ports = []v1.ServicePort{{Name: "p", Port: 80, Protocol: v1.ProtocolTCP}, {Name: "u", Port: 80, Protocol: v1.ProtocolUDP}}
	return s
}

// slicesOf returns the dual-stack EndpointSlices of a Service with these pods.
func slicesOf(service string, pods ...*lab.Pod) []*discoveryv1.EndpointSlice {
	four, six := writertest.Slice(service+"-4", service), writertest.Slice(service+"-6", service)
	six.AddressType = discoveryv1.AddressTypeIPv6
	for _, s := range []*discoveryv1.EndpointSlice{four, six} {
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: ptr.To("u"), Port: ptr.To[int32](targetPort), Protocol: ptr.To(v1.ProtocolUDP)})
		for _, p := range pods {
			addr := p.Addr4
			if s == six {
				addr = p.Addr6
			}
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{addr.String()}, NodeName: ptr.To(p.Node.Name)})
		}
	}
	return []*discoveryv1.EndpointSlice{four, six}
}

func (n *node) setPods(pods ...*lab.Pod) {
	for _, s := range slicesOf("web", pods...) {
		n.OnEndpointSliceUpdate(nil, s)
	}
}

// serve starts a TCP and a UDP server in a pod.
func serve(t testing.TB, p *lab.Pod) *lab.Pod {
	t.Helper()
	if _, err := p.ServeTCP(targetPort); err != nil {
		t.Fatal(err)
	}
	if _, err := p.ServeUDP(targetPort); err != nil {
		t.Fatal(err)
	}
	return p
}

func targets() map[string]netip.AddrPort {
	return map[string]netip.AddrPort{
		"tcp4": netip.AddrPortFrom(vip4, 80), "udp4": netip.AddrPortFrom(vip4, 80),
		"tcp6": netip.AddrPortFrom(vip6, 80), "udp6": netip.AddrPortFrom(vip6, 80),
	}
}

func shortly(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

// tablesOf returns the tables of a tier. Nothing else may change them meanwhile.
func tablesOf(tier *Tier) (all *lbmap.Tables) {
	_ = tier.writer.Read(func(t *lbmap.Tables) error { all = t; return nil })
	return all
}
