// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
)

// claim is one address and port that a service port claims.
type claim struct {
	addr    netip.AddrPort // has the unspecified address for a NodePort
	kind    proxier.Kind
	owner   proxier.ServicePortName
	service *v1.Service
}

// read returns the claims of all service ports.
func (c *Cluster) read() []claim {
	if c.claims != nil {
		return c.claims
	}
	c.claims = []claim{}
	for _, s := range c.Services {
		c.claims = append(c.claims, c.claimsOf(s)...)
	}
	return c.claims
}

func (c *Cluster) claimsOf(s *v1.Service) []claim {
	if !proxied(s) {
		return nil
	}
	var claims []claim
	seen := map[proxier.ServicePortName]bool{}
	for _, p := range s.Spec.Ports {
		protocol, err := proxier.ParseProtocol(p.Protocol)
		number, valid := portNumber(p.Port)
		if err != nil || !valid {
			continue
		}
		owner := proxier.ServicePortName{NamespacedName: nameOf(s), Port: p.Name, Protocol: protocol}
		if seen[owner] {
			continue // names of ports are unique within a Service
		}
		seen[owner] = true
		for f := range proxier.Families {
			ip := clusterIP(s, f)
			if !ip.IsValid() {
				continue // no frontends in this family (S03)
			}
			taken := map[netip.Addr]bool{}
			add := func(kind proxier.Kind, addr netip.Addr, port uint16) {
				if wants(s, kind) && (kind == proxier.ClusterIP || c.isSelected(s)) {
					taken[addr] = true
					claims = append(claims, claim{addr: netip.AddrPortFrom(addr, port), kind: kind, owner: owner, service: s})
				}
			}
			add(proxier.ClusterIP, ip, number)
			for _, lb := range s.Status.LoadBalancer.Ingress {
				vip := lb.IPMode == nil || *lb.IPMode == v1.LoadBalancerIPModeVIP // S06
				if addr, ok := externalAddr(lb.IP, f); ok && vip && !taken[addr] {
					add(proxier.LoadBalancer, addr, number)
				}
			}
			for _, text := range s.Spec.ExternalIPs {
				if addr, ok := externalAddr(text, f); ok && !taken[addr] && !c.Policy.IgnoreExternalIPs {
					add(proxier.ExternalIP, addr, number)
				}
			}
			if nodePort, ok := portNumber(p.NodePort); ok {
				add(proxier.NodePort, unspecified(f), nodePort)
			}
		}
	}
	return claims
}

// wants reports whether a Service is to have frontends of a kind (S95).
func wants(s *v1.Service, kind proxier.Kind) bool {
	list, there := s.Annotations["service.tandem-proxy.dev/type"]
	if !there {
		list, there = s.Annotations["service.cilium.io/type"]
	}
	wanted := false
	for _, word := range strings.Split(list, ",") {
		switch word = strings.ToLower(strings.TrimSpace(word)); word {
		case "clusterip", "loadbalancer", "externalip", "nodeport":
			wanted = wanted || word == strings.ToLower(kind.String())
		default:
			there = false // the whole list is ignored
		}
	}
	return wanted || !there
}

// isSelected reports whether this node serves external frontends of a Service (S97). Worlds select by equality alone.
func (c *Cluster) isSelected(s *v1.Service) bool {
	for _, prefix := range []string{"service.tandem-proxy.dev/", "service.cilium.io/"} {
		if text, there := s.Annotations[prefix+"node-selector"]; there {
			label, value, valid := strings.Cut(text, "=")
			if is, has := c.Facts.Labels[label]; valid && (!has || is != value) {
				return false
			}
			break
		}
	}
	return true
}

// winner returns the claim that gets an address; nil for none.
func (c *Cluster) winner(addr netip.AddrPort, protocol proxier.Protocol) *claim {
	var best *claim
	claims := c.read()
	for i := range claims {
		if cl := &claims[i]; cl.addr == addr && cl.owner.Protocol == protocol && (best == nil || cl.beats(best)) {
			best = cl
		}
	}
	return best
}

func (cl *claim) beats(o *claim) bool {
	return cmp.Or(
		cmp.Compare(cl.kind, o.kind),
		cl.service.CreationTimestamp.Compare(o.service.CreationTimestamp.Time),
		comparePorts(cl.owner, o.owner),
	) < 0
}

func comparePorts(a, b proxier.ServicePortName) int {
	return cmp.Or(
		cmp.Compare(a.Namespace, b.Namespace),
		cmp.Compare(a.Name, b.Name),
		cmp.Compare(a.Port, b.Port),
		cmp.Compare(a.Protocol, b.Protocol),
	)
}

// proxied reports whether this proxy must serve a Service (S01).
func proxied(s *v1.Service) bool {
	_, anothers := s.Labels[proxier.LabelServiceProxyName]
	return !anothers && s.Spec.Type != v1.ServiceTypeExternalName && s.Spec.ClusterIP != v1.ClusterIPNone
}

// clusterIP returns the ClusterIP of a family; the zero Addr for none.
func clusterIP(s *v1.Service, f proxier.Family) netip.Addr {
	list := s.Spec.ClusterIPs
	if len(list) == 0 {
		list = []string{s.Spec.ClusterIP}
	}
	for _, text := range list {
		if addr, ok := serviceAddr(text, f); ok {
			return addr
		}
	}
	return netip.Addr{}
}

// serviceAddr parses an address at which a Service can be served.
func serviceAddr(text string, f proxier.Family) (netip.Addr, bool) {
	addr, err := parseAddr(text)
	if err != nil || !plain(addr) || family(addr) != f {
		return netip.Addr{}, false
	}
	return addr, !addr.IsUnspecified() && !addr.IsLoopback() && !addr.IsMulticast()
}

// externalAddr parses an external IP or a load balancer IP.
func externalAddr(text string, f proxier.Family) (netip.Addr, bool) {
	addr, ok := serviceAddr(text, f)
	return addr, ok && !addr.IsLinkLocalUnicast()
}

func affinity(s *v1.Service) time.Duration {
	if s.Spec.SessionAffinity != v1.ServiceAffinityClientIP {
		return 0
	}
	seconds := v1.DefaultClientIPServiceAffinitySeconds
	if cfg := s.Spec.SessionAffinityConfig; cfg != nil && cfg.ClientIP != nil && cfg.ClientIP.TimeoutSeconds != nil {
		if t := *cfg.ClientIP.TimeoutSeconds; t >= 1 && t <= 24*60*60 {
			seconds = t
		}
	}
	return time.Duration(seconds) * time.Second
}

func internalLocal(s *v1.Service) bool {
	return ptr.Deref(s.Spec.InternalTrafficPolicy, "") == v1.ServiceInternalTrafficPolicyLocal
}

func externalLocal(s *v1.Service) bool {
	return s.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal
}

// route returns which set a frontend uses for clients of that origin, and which source the
// backend sees.
func (c *Cluster) route(found *claim, from proxier.Origin) (onlyLocal bool, source proxier.Source) {
	if found.kind == proxier.ClusterIP {
		detector := c.knowsPods(family(found.addr.Addr()))
		if c.Policy.MasqueradeAll || detector && from != proxier.FromPod { // S50
			source = proxier.Masquerade
		}
		return internalLocal(found.service), source
	}
	if externalLocal(found.service) {
		switch from {
		case proxier.FromPod: // S43
			return false, proxier.KeepSource
		case proxier.FromHost: // S44
			return false, proxier.Masquerade
		}
		return true, proxier.KeepSource // S45
	}
	if from == proxier.FromPod {
		return false, proxier.AnySource
	}
	return false, proxier.Masquerade // S46
}

// admits reports whether the source ranges admit a client of a load balancer IP.
func (c *Cluster) admits(found *claim, client netip.Addr) bool {
	vip := found.addr.Addr()
	mine, others, invalid := ranges(found.service, family(vip))
	if len(mine)+others+invalid == 0 {
		return true // there are none
	}
	node := c.Facts.NodeIPs[family(vip)]
	in := func(addr netip.Addr) bool {
		return slices.ContainsFunc(mine, func(p netip.Prefix) bool { return p.Contains(addr) })
	}
	if denies(found.service) { // S96
		return !in(client) || client == vip && node.IsValid() && !in(node)
	}
	if slices.ContainsFunc(mine, func(p netip.Prefix) bool { return p.Bits() == 0 }) {
		return true
	}
	if len(mine) == 0 && invalid == 0 { // only ranges of the other family
		return !c.Policy.StrictSourceRanges
	}
	return in(client) || client == vip && node.IsValid() && in(node) // S49
}

// denies reports whether the source ranges are those of clients that are not admitted.
func denies(s *v1.Service) bool {
	policy, there := s.Annotations["service.tandem-proxy.dev/src-ranges-policy"]
	if !there {
		policy = s.Annotations["service.cilium.io/src-ranges-policy"]
	}
	return policy == "deny"
}

// ranges returns the source ranges of a family, and the number of ranges of the other
// family and of invalid ones.
func ranges(s *v1.Service, f proxier.Family) (mine []netip.Prefix, others, invalid int) {
	for _, text := range s.Spec.LoadBalancerSourceRanges {
		p, err := parsePrefix(strings.TrimSpace(text))
		switch {
		case err != nil || !plain(p.Addr()):
			invalid++
		case family(p.Addr()) != f:
			others++
		default:
			mine = append(mine, p)
		}
	}
	return mine, others, invalid
}
