// SPDX-License-Identifier: Apache-2.0

package differential

import (
	"cmp"
	"embed"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
)

//go:embed testdata/cases
var caseFiles embed.FS

// Story is one part of a case file, in one family: steps, and what holds after each of them.
type Story struct {
	Name   string
	Facts  proxier.Facts
	Policy proxier.Policy
	Steps  []Step

	family   proxier.Family
	services []string // in the order of their addresses
	ports    map[string][]v1.ServicePort
	pods     map[string]netip.Addr
}

// Step is a set of changes that take effect together, and what holds then.
type Step struct {
	Services     []*v1.Service // new states
	Slices       []*discoveryv1.EndpointSlice
	GoneServices []types.NamespacedName
	GoneSlices   []types.NamespacedName
	Expectations []Expectation
	HealthChecks []HealthExpectation
	Conntrack    []FlowExpectation
}

// Expectation is what becomes of a packet.
type Expectation struct {
	Text     string
	Flow     proxier.Flow
	Outcome  proxier.Outcome
	Backends []netip.Addr
	Hidden   bool // the backends see this node
	Affinity time.Duration
}

// HealthExpectation is the health check of a Service.
type HealthExpectation struct {
	Text  string
	Name  types.NamespacedName
	None  bool
	Ready int
}

// FlowExpectation is what becomes of a UDP entry of conntrack.
type FlowExpectation struct {
	Text string
	Flow udpEntry
	Gone bool
}

type udpEntry struct{ source, destination, replies netip.AddrPort }

const caseNamespace = "shop"

// Stories reads the case files. Each part begins with a line "== title", and is played in both
// families, but for one with a line "only ipv4" or "only ipv6". The other lines:
//
//	node zone=z1 detect=none strict …        settings; see settings below
//	service web type=NodePort etp=Local …    a Service, new or changed; see service below
//	slice web a@node1 b@node2/draining+z1 …  a slice, new or changed; see slice below
//	delete service web
//	delete slice web-1
//	then                                     begins the next step
//	pod,host -> web:node,web:lb : a b        who reaches whom
//	health web : 2                           ready endpoints here, or none
//	udp outside -> web => a : kept           what becomes of an entry of conntrack, or gone
func Stories() ([]*Story, error) {
	files, err := caseFiles.ReadDir("testdata/cases")
	if err != nil {
		return nil, err
	}
	var list []*Story
	for _, f := range files {
		text, err := caseFiles.ReadFile(path.Join("testdata/cases", f.Name()))
		if err != nil {
			return nil, err
		}
		for family := range proxier.Families {
			stories, err := parseStories(strings.TrimSuffix(f.Name(), ".txt"), string(text), family)
			if err != nil {
				return nil, err
			}
			list = append(list, stories...)
		}
	}
	return list, nil
}

func parseStories(file, text string, family proxier.Family) (list []*Story, err error) {
	var s *Story
	skipped := false
	for i, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#!")
		line = strings.TrimSpace(line)
		title, isTitle := strings.CutPrefix(line, "== ")
		switch {
		case line == "" || strings.HasPrefix(line, "#"):
		case isTitle:
			s, skipped = newStory(fmt.Sprintf("%s/%s/%s", file, family, title), family), false
			list = append(list, s)
		case s == nil:
			return nil, fmt.Errorf("%s.txt:%d: no title yet", file, i+1)
		case strings.HasPrefix(line, "only "):
			if skipped = !strings.EqualFold(line[5:], family.String()); skipped {
				list = list[:len(list)-1]
			}
		case skipped:
		default:
			if err := s.line(line, fmt.Sprintf("%s.txt:%d", file, i+1)); err != nil {
				return nil, fmt.Errorf("%s.txt:%d: %w", file, i+1, err)
			}
		}
	}
	return list, nil
}

// Addresses follow the plan of package lab: this node is 172.18.0.1, with 172.18.1.1 as well,
// and its pods are 10.244.1.x. Service n has 10.96.0.n and 203.0.113.n, and 203.0.113.100+n as
// its second load balancer IP, 203.0.113.200+n as its external IP. It serves NodePort 30000+100n
// and up.
func (s *Story) addr(v4, v6 string, args ...any) netip.Addr {
	if s.family == proxier.IPv6 {
		v4 = v6
	}
	return netip.MustParseAddr(fmt.Sprintf(v4, args...))
}

func (s *Story) prefix(v4, v6 string) netip.Prefix {
	if s.family == proxier.IPv6 {
		v4 = v6
	}
	return netip.MustParsePrefix(v4)
}

func newStory(name string, family proxier.Family) *Story {
	s := &Story{Name: name, family: family, Steps: make([]Step, 1), ports: map[string][]v1.ServicePort{}, pods: map[string]netip.Addr{}}
	s.Facts.NodeIPs = [proxier.Families]netip.Addr{netip.MustParseAddr("172.18.0.1"), netip.MustParseAddr("fd00:18::1")}
	s.Facts.Pods.CIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")}
	for _, text := range []string{"127.0.0.1", "172.18.0.1", "172.18.1.1", "::1", "fd00:18::1", "fd00:18::1:1"} {
		s.Facts.LocalAddrs = append(s.Facts.LocalAddrs, netip.MustParseAddr(text))
	}
	slices.SortFunc(s.Facts.LocalAddrs, netip.Addr.Compare)
	s.Policy.NodePorts.Loopback = true
	return s
}

func (s *Story) step() *Step { return &s.Steps[len(s.Steps)-1] }

func (s *Story) line(line, at string) error {
	words := strings.Fields(line)
	rest := words[1:]
	before, after, expects := strings.Cut(line, " : ")
	switch {
	case line == "then":
		s.Steps = append(s.Steps, Step{})
		return nil
	case words[0] == "node":
		return s.settings(rest)
	case words[0] == "service" && len(rest) > 0:
		return s.service(rest[0], rest[1:])
	case words[0] == "slice" && len(rest) > 0:
		return s.slice(rest[0], rest[1:])
	case words[0] == "delete" && len(rest) == 2:
		name := types.NamespacedName{Namespace: caseNamespace, Name: rest[1]}
		if rest[0] == "service" {
			s.step().GoneServices = append(s.step().GoneServices, name)
			return nil
		}
		s.step().GoneSlices = append(s.step().GoneSlices, name)
		return nil
	case !expects:
		return fmt.Errorf("unknown line %q", line)
	case words[0] == "health":
		h := HealthExpectation{Text: at + ": " + line, Name: types.NamespacedName{Namespace: caseNamespace, Name: rest[0]}}
		if h.None = after == "none"; !h.None {
			var err error
			if h.Ready, err = strconv.Atoi(after); err != nil {
				return err
			}
		}
		s.step().HealthChecks = append(s.step().HealthChecks, h)
		return nil
	case words[0] == "udp":
		return s.udp(strings.TrimPrefix(before, "udp "), after, at)
	}
	return s.expect(before, after, at)
}

// settings are zone=…, detect=none, detect=node (its pods alone), detect=bridge, service-cidrs,
// masquerade-all, no-external-ips, strict, no-localhost, and nodeports=… with CIDRs or words,
// where "node" is the node's first address and "second" its second one.
func (s *Story) settings(words []string) error {
	for _, w := range words {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "zone":
			s.Facts.Zone = value
		case "detect":
			switch value {
			case "none":
				s.Facts.Pods = proxier.Detector{}
			case "node":
				s.Facts.Pods.CIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:10:244:1::/64")}
			case "bridge":
				s.Facts.Pods = proxier.Detector{Interface: "pod1"}
			default:
				return fmt.Errorf("detect=%s", value)
			}
		case "service-cidrs":
			s.Facts.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}
		case "masquerade-all":
			s.Policy.MasqueradeAll = true
		case "no-external-ips":
			s.Policy.IgnoreExternalIPs = true
		case "strict":
			s.Policy.StrictSourceRanges = true
		case "no-localhost":
			s.Policy.NodePorts.Loopback = false
		case "nodeports":
			list := strings.Split(value, ",")
			for i, word := range list {
				switch word {
				case "node":
					list[i] = s.prefix("172.18.0.1/32", "fd00:18::1/128").String()
				case "second":
					list[i] = s.prefix("172.18.1.0/24", "fd00:18::1:0/112").String()
				case "loopback":
					list[i] = s.prefix("127.0.0.0/8", "::1/128").String()
				}
			}
			selector, _, err := proxier.ParseNodePortSelector(list, s.Policy.NodePorts.Loopback)
			if err != nil {
				return err
			}
			s.Policy.NodePorts = selector
		default:
			return fmt.Errorf("unknown setting %q", w)
		}
	}
	return nil
}

// number of a Service, which its addresses have.
func (s *Story) number(name string) int {
	i := slices.Index(s.services, name)
	if i < 0 {
		i = len(s.services)
		s.services = append(s.services, name)
	}
	return 1 + i
}

// vip returns an address of a Service: ip, lb, lb2, external.
func (s *Story) vip(name, kind string) (netip.Addr, bool) {
	n := s.number(name)
	switch kind {
	case "ip":
		return s.addr("10.96.0.%d", "fd00:10:96::%x", n), true
	case "lb":
		return s.addr("203.0.113.%d", "2001:db8:203:113::%x", n), true
	case "lb2":
		return s.addr("203.0.113.%d", "2001:db8:203:113::%x", 100+n), true
	case "external":
		return s.addr("203.0.113.%d", "2001:db8:203:113::%x", 200+n), true
	}
	return netip.Addr{}, false
}

// service has ports=name:80/udp,…; type=…, where headless is one; etp=Local, itp=Local; external; lb
// and lb2, or lb=Proxy; ranges=clients,pods,node,all,other; affinity=10; health; no-node-ports;
// label=proxy, label=headless; dual.
func (s *Story) service(name string, words []string) error {
	n := s.number(name)
	ip, _ := s.vip(name, "ip")
	o := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: caseNamespace, Name: name},
		Spec:       v1.ServiceSpec{Type: v1.ServiceTypeClusterIP, ClusterIP: ip.String(), ClusterIPs: []string{ip.String()}},
	}
	ports, nodePorts := "http:80", true
	for _, w := range words {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "ports":
			ports = value
		case "type":
			if o.Spec.Type = v1.ServiceType(value); value == "headless" {
				o.Spec.Type, o.Spec.ClusterIP, o.Spec.ClusterIPs = v1.ServiceTypeClusterIP, v1.ClusterIPNone, []string{v1.ClusterIPNone}
			}
			if o.Spec.Type == v1.ServiceTypeExternalName {
				o.Spec.ClusterIP, o.Spec.ClusterIPs = "", nil
			}
		case "dual":
			other := newStory("", 1-s.family)
			other.services = s.services
			ip, _ := other.vip(name, "ip")
			o.Spec.ClusterIPs = append(o.Spec.ClusterIPs, ip.String())
		case "etp":
			o.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicy(value)
		case "itp":
			o.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicy(value))
		case "external":
			a, _ := s.vip(name, key)
			o.Spec.ExternalIPs = append(o.Spec.ExternalIPs, a.String())
		case "lb", "lb2":
			a, _ := s.vip(name, key)
			in := v1.LoadBalancerIngress{IP: a.String()}
			if value != "" {
				in.IPMode = ptr.To(v1.LoadBalancerIPMode(value))
			}
			o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress, in)
		case "hostname":
			o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{Hostname: "lb.example.com"})
		case "ranges":
			for _, r := range strings.Split(value, ",") {
				text, ok := map[string]string{
					"clients": s.prefix("198.51.100.0/25", "2001:db8:51:100::/121").String(),
					"pods":    s.prefix("10.244.0.0/16", "fd00:10:244::/48").String(),
					"node":    s.prefix("172.18.0.1/32", "fd00:18::1/128").String(),
					"all":     s.prefix("0.0.0.0/0", "::/0").String(),
					"other":   newStory("", 1-s.family).prefix("198.51.100.0/25", "2001:db8:51:100::/121").String(),
					"padded":  " " + s.prefix("198.51.100.0/25", "2001:db8:51:100::/121").String() + " ",
					"hostbit": s.prefix("198.51.100.9/25", "2001:db8:51:100::9/121").String(),
				}[r]
				if !ok {
					return fmt.Errorf("unknown range %q", r)
				}
				o.Spec.LoadBalancerSourceRanges = append(o.Spec.LoadBalancerSourceRanges, text)
			}
		case "affinity":
			seconds, err := strconv.Atoi(value)
			if err != nil {
				return err
			}
			o.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			o.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To(int32(seconds))}}
		case "health":
			o.Spec.HealthCheckNodePort = int32(32000 + n)
		case "no-node-ports":
			nodePorts = false
		case "label":
			o.Labels = map[string]string{map[string]string{"proxy": proxier.LabelServiceProxyName, "headless": proxier.LabelHeadless}[value]: ""}
		default:
			return fmt.Errorf("unknown property %q of a Service", w)
		}
	}
	nodePorts = nodePorts && (o.Spec.Type == v1.ServiceTypeNodePort || o.Spec.Type == v1.ServiceTypeLoadBalancer)
	for i, text := range strings.Split(ports, ",") {
		port, number, protocol, err := parsePort(text)
		if err != nil {
			return err
		}
		p := v1.ServicePort{Name: port, Port: number, Protocol: protocol}
		if nodePorts {
			p.NodePort = int32(30000 + 100*n + i)
		}
		o.Spec.Ports = append(o.Spec.Ports, p)
	}
	s.ports[name] = o.Spec.Ports
	s.step().Services = append(s.step().Services, o)
	return nil
}

// parsePort reads name:80/udp.
func parsePort(text string) (name string, number int32, protocol v1.Protocol, err error) {
	text, word, _ := strings.Cut(text, "/")
	name, digits, _ := strings.Cut(text, ":")
	n, err := strconv.Atoi(digits)
	return name, int32(n), cmp.Or(v1.Protocol(strings.ToUpper(word)), v1.ProtocolTCP), err
}

// slice has name=…, where the default is the Service's with -1; ports=…, where the default is those of the
// Service, beginning with 8080; headless; and endpoints: a@node1 is one, where a name
// always has the same address, and a@- has no node. Conditions follow a slash: unready; slow (not ready,
// serving); draining (terminating, serving), stopped (terminating, not serving); early (terminating,
// but ready). Hints follow plus signs: zones, or nodes.
func (s *Story) slice(service string, words []string) error {
	o := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: caseNamespace, Name: service + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressType(ipFamilies[s.family]),
	}
	for i, p := range s.ports[service] {
		o.Ports = append(o.Ports, discoveryv1.EndpointPort{Name: ptr.To(p.Name), Port: ptr.To(int32(8080 + i)), Protocol: ptr.To(p.Protocol)})
	}
	for _, w := range words {
		key, value, isSetting := strings.Cut(w, "=")
		switch {
		case key == "name":
			o.Name = value
		case key == "headless":
			o.Labels[proxier.LabelHeadless] = ""
		case key == "ports":
			o.Ports = nil
			for _, text := range strings.Split(value, ",") {
				name, number, protocol, err := parsePort(text)
				if err != nil {
					return err
				}
				o.Ports = append(o.Ports, discoveryv1.EndpointPort{Name: &name, Port: &number, Protocol: &protocol})
			}
		case isSetting:
			return fmt.Errorf("unknown property %q of a slice", w)
		default:
			e, err := s.endpoint(w)
			if err != nil {
				return err
			}
			o.Endpoints = append(o.Endpoints, e)
		}
	}
	s.step().Slices = append(s.step().Slices, o)
	return nil
}

func (s *Story) endpoint(word string) (e discoveryv1.Endpoint, err error) {
	parts := strings.Split(word, "+")
	for _, h := range parts[1:] {
		if e.Hints == nil {
			e.Hints = &discoveryv1.EndpointHints{}
		}
		if strings.HasPrefix(h, "node") {
			e.Hints.ForNodes = append(e.Hints.ForNodes, discoveryv1.ForNode{Name: h})
		} else {
			e.Hints.ForZones = append(e.Hints.ForZones, discoveryv1.ForZone{Name: h})
		}
	}
	at, condition, _ := strings.Cut(parts[0], "/")
	name, node, _ := strings.Cut(at, "@")
	digit := 9
	if node != "-" {
		if digit, err = strconv.Atoi(strings.TrimPrefix(node, "node")); err != nil {
			return e, fmt.Errorf("endpoint %q has no node", word)
		}
		e.NodeName = &node
	}
	if _, known := s.pods[name]; !known {
		s.pods[name] = s.addr("10.244.%d.%d", "fd00:10:244:%x::%x", digit, 1+len(s.pods))
		if node == "node1" && strings.HasPrefix(name, "host") { // in the host's network
			s.pods[name] = s.Facts.NodeIPs[s.family]
		}
	}
	e.Addresses = []string{s.pods[name].String()}
	yes, no := ptr.To(true), ptr.To(false)
	conditions, ok := map[string]discoveryv1.EndpointConditions{
		"":         {Ready: yes, Serving: yes, Terminating: no},
		"unknown":  {},
		"unready":  {Ready: no, Serving: no, Terminating: no},
		"slow":     {Ready: no, Serving: yes, Terminating: no},
		"draining": {Ready: no, Serving: yes, Terminating: yes},
		"stopped":  {Ready: no, Serving: no, Terminating: yes},
		"early":    {Ready: yes, Serving: yes, Terminating: yes},
	}[condition]
	if !ok {
		return e, fmt.Errorf("unknown condition of %q", word)
	}
	e.Conditions = conditions
	return e, nil
}
