// SPDX-License-Identifier: Apache-2.0

//go:build linux

package upstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/scenarios"
	"github.com/tandem-proxy/tandem/test/scenarios/live"
)

// syncTimeout is how long a change may take.
var syncTimeout = 15 * time.Second * lab.Slower()

// Players is how many scenarios should be played at a time. Most of the time they wait, but on an emulated
// machine.
func Players() int {
	if lab.Slower() > 1 {
		return 1
	}
	return 4
}

// NoSync is the error if a change was not synced in time.
const NoSync = "wait for kube-proxy"

// Program is upstream's kube-proxy as a scenario starts it.
type Program struct {
	Binary string
	// Mode is iptables, nftables or ipvs.
	Mode string
	// Started is called after each start of a process, with the flags that it has in common with
	// others; optional.
	Started func(ctx context.Context, node *lab.Node, p *Proxy, flags []string) error
}

// Network is what the lab needs for the program.
func (p Program) Network() lab.Options { return lab.Options{PortsInTurn: p.Mode == "ipvs"} }

// Start implements live.Program.
func (p Program) Start(ctx context.Context, node *lab.Node, config *scenarios.Config, objects []metav1.Object) (live.Proxy, error) {
	r := &running{Program: p, node: node, args: argsOf(config, p.Mode), pods: clusterCIDR(config)}
	for _, o := range objects {
		r.keep(defaulted(o))
	}
	return r, r.start(ctx)
}

// argsOf are the flags for a configuration. What upstream does not have is left out.
func argsOf(c *scenarios.Config, mode string) []string {
	args := append(slices.Clone(Flags),
		"--iptables-min-sync-period=50ms", "--ipvs-min-sync-period=50ms",
		"--iptables-localhost-nodeports="+strconv.FormatBool(c.LocalhostNodePorts), "--masquerade-all="+strconv.FormatBool(c.MasqueradeAll),
		"--nodeport-addresses="+strings.Join(nodePortAddresses(c, mode), ","))
	if !c.AllowServiceExternalIPs {
		args = append(args, "--feature-gates=AllowServiceExternalIPs=false")
	}
	switch detect := c.Detect.Mode; detect {
	case scenarios.DetectNone, scenarios.DetectClusterCIDR:
	case scenarios.DetectBridgeInterface:
		args = append(args, "--detect-local-mode="+detect, "--pod-bridge-interface="+c.Detect.Interface)
	case scenarios.DetectInterfaceNamePrefix:
		args = append(args, "--detect-local-mode="+detect, "--pod-interface-name-prefix="+c.Detect.Interface)
	default:
		args = append(args, "--detect-local-mode="+detect)
	}
	return args
}

// nodePortAddresses are those of a configuration. Without a word or a range of a family, mode nftables
// serves primary addresses alone, and the others all.
func nodePortAddresses(c *scenarios.Config, mode string) []string {
	list := slices.Clone(c.NodePortAddresses)
	if mode != "nftables" || slices.ContainsFunc(list, func(a string) bool { return !strings.Contains(a, "/") }) {
		return list
	}
	for mark, all := range map[string]string{".": "0.0.0.0/0", ":": "::/0"} {
		if !slices.ContainsFunc(list, func(a string) bool { return strings.Contains(a, mark) }) {
			list = append(list, all)
		}
	}
	return list
}

// clusterCIDR is what Options want.
func clusterCIDR(c *scenarios.Config) string {
	if c.Detect.Mode == scenarios.DetectNone {
		return NoPods
	}
	var list []string
	for _, p := range c.Detect.CIDRs {
		list = append(list, p.String())
	}
	return strings.Join(list, ",")
}

// defaulted is an object with what an API server adds, and upstream relies on.
func defaulted(o metav1.Object) fakeapi.Object {
	object := o.(fakeapi.Object).DeepCopyObject().(fakeapi.Object)
	switch o := object.(type) {
	case *v1.Service:
		for i := range o.Spec.Ports {
			setDefault(&o.Spec.Ports[i].Protocol, v1.ProtocolTCP)
		}
		setDefault(&o.Spec.Type, v1.ServiceTypeClusterIP)
		setDefault(&o.Spec.SessionAffinity, v1.ServiceAffinityNone)
		if o.Spec.SessionAffinity == v1.ServiceAffinityClientIP {
			setDefault(&o.Spec.SessionAffinityConfig, &v1.SessionAffinityConfig{})
			setDefault(&o.Spec.SessionAffinityConfig.ClientIP, &v1.ClientIPConfig{})
			setDefault(&o.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds, ptr.To(v1.DefaultClientIPServiceAffinitySeconds))
		}
		for i := range o.Status.LoadBalancer.Ingress {
			setDefault(&o.Status.LoadBalancer.Ingress[i].IPMode, ptr.To(v1.LoadBalancerIPModeVIP))
		}
		// Families follow from addresses, where they were allocated.
		if list := o.Spec.ClusterIPs; len(list) == 0 && o.Spec.ClusterIP != "" {
			o.Spec.ClusterIPs = []string{o.Spec.ClusterIP}
		}
		o.Spec.IPFamilies = nil
		for _, ip := range o.Spec.ClusterIPs {
			family := v1.IPv4Protocol
			if strings.Contains(ip, ":") {
				family = v1.IPv6Protocol
			}
			o.Spec.IPFamilies = append(o.Spec.IPFamilies, family)
		}
	case *discoveryv1.EndpointSlice:
		for i := range o.Ports {
			setDefault(&o.Ports[i].Protocol, ptr.To(v1.ProtocolTCP))
			setDefault(&o.Ports[i].Name, ptr.To(""))
		}
	}
	return object
}

func setDefault[T comparable](field *T, value T) { *field = cmp.Or(*field, value) }

// running is a live.Proxy.
type running struct {
	Program
	node    *lab.Node
	args    []string
	pods    string
	objects []fakeapi.Object
	proxy   *Proxy
	turn    int32
}

// keep stores an object for the next start.
func (r *running) keep(o fakeapi.Object) {
	r.drop(o)
	r.objects = append(r.objects, o)
}

func (r *running) drop(o fakeapi.Object) {
	r.objects = slices.DeleteFunc(r.objects, func(x fakeapi.Object) bool {
		return fmt.Sprintf("%T", x) == fmt.Sprintf("%T", o) && x.GetNamespace() == o.GetNamespace() && x.GetName() == o.GetName()
	})
}

func (r *running) start(ctx context.Context) error {
	p, err := Start(ctx, r.node, Options{Binary: r.Binary, Mode: r.Mode, Objects: r.objects, ClusterCIDR: r.pods, Args: r.args})
	if err != nil {
		return err
	}
	r.proxy = p
	if r.Started == nil {
		return nil
	}
	flags := append([]string{"--master=" + p.URL}, r.args...)
	if r.pods != NoPods {
		flags = append(flags, "--cluster-cidr="+r.pods)
	}
	return r.Started(ctx, r.node, p, flags)
}

func (r *running) End() { _ = r.proxy.Close() }

func (r *running) Apply(ctx context.Context, changes []scenarios.ObjectChange) error {
	turns := 2 // conntrack is brought up to date after rules
	for _, c := range changes {
		o := defaulted(cmp.Or(c.New, c.Old))
		if _, ok := o.(*v1.Node); ok {
			turns = 6 // Nodes arrive through another watch than the marks
		}
		if c.New == nil {
			r.drop(o)
			r.proxy.API.Delete(o)
			continue
		}
		r.keep(o)
		r.proxy.API.Put(o)
	}
	for range turns {
		if err := r.await(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (r *running) Learn(ctx context.Context) error { return r.await(ctx) }

// mark changes a Service without clients.
func (r *running) mark() {
	const address4, address6 = "10.96.254.254", "fd00:10:96::fefe"
	meta := metav1.ObjectMeta{Namespace: "last", Name: "last", Labels: map[string]string{discoveryv1.LabelServiceName: "last"}}
	r.proxy.API.Put(&v1.Service{ObjectMeta: meta, Spec: v1.ServiceSpec{
		ClusterIP: address4, ClusterIPs: []string{address4, address6}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol},
		Ports: []v1.ServicePort{{Port: r.turn, Protocol: v1.ProtocolTCP}},
	}})
	for kind, address := range map[discoveryv1.AddressType]string{discoveryv1.AddressTypeIPv4: "192.0.2.1", discoveryv1.AddressTypeIPv6: "2001:db8:192::1"} {
		meta.Name = strings.ToLower(string(kind))
		r.proxy.API.Put(&discoveryv1.EndpointSlice{
			ObjectMeta: meta, AddressType: kind, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{address}}},
			Ports: []discoveryv1.EndpointPort{{Name: ptr.To(""), Port: ptr.To(r.turn), Protocol: ptr.To(v1.ProtocolTCP)}},
		})
	}
}

// await waits until a mark is programmed in both families: all that came before is then,
// too. A process that ends is started again, as in a cluster.
func (r *running) await(ctx context.Context) error {
	r.turn++
	r.mark()
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	restarts := 0
	err := wait.PollUntilContextCancel(ctx, 20*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		if r.proxy.process.Ended() {
			if restarts++; restarts > 3 {
				return false, errors.New("it ends again and again")
			}
			err := r.start(ctx)
			r.mark()
			return false, err
		}
		for family := range marks {
			if there, err := r.marked(ctx, family); !there || err != nil {
				return false, err
			}
		}
		return true, nil
	})
	if err != nil {
		return fmt.Errorf("%s: %w; its log:\n%s", NoSync, err, r.proxy.Log())
	}
	return nil
}

// marks are the texts that a mark leaves, by family: of its endpoint and its Service.
var marks = map[string]struct{ save, iptables, nftables, destination, server string }{
	"ip":  {"iptables-save", "--to-destination 192.0.2.1:%d\n", "dnat to 192.0.2.1:%d\n", "-> 192.0.2.1:%d ", "TCP  10.96.254.254:%d "},
	"ip6": {"ip6tables-save", "--to-destination [2001:db8:192::1]:%d\n", "dnat to [2001:db8:192::1]:%d\n", "-> [2001:db8:192::1]:%d ", "TCP  [fd00:10:96::fefe]:%d "},
}

// marked reports whether the newest mark is programmed.
func (r *running) marked(ctx context.Context, family string) (bool, error) {
	mark := marks[family]
	command, endpoint, service := []string{mark.save, "-t", "nat"}, mark.iptables, " --dport %d -j KUBE-SVC-"
	switch r.Mode {
	case "nftables":
		command, endpoint, service = []string{"nft", "list", "table", family, "kube-proxy"}, mark.nftables, " . tcp . %d "
	case "ipvs":
		command, endpoint, service = []string{"ipvsadm", "-Ln"}, mark.destination, mark.server
	}
	text, err := r.node.Command(ctx, command[0], command[1:]...).Output()
	return strings.Contains(string(text), fmt.Sprintf(endpoint, r.turn)) && strings.Contains(string(text), fmt.Sprintf(service, r.turn)), err
}
