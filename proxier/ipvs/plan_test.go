// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/proxiertest"
)

// text is a plan as text.
func (p *plan) text() string {
	if p == nil {
		return "nothing\n"
	}
	var lines []string
	for _, s := range p.servers {
		line := fmt.Sprintf("server %s %s", s.key, s.Scheduler)
		if s.Flags != 0 || s.Timeout != 0 {
			line += fmt.Sprintf(" flags %#x timeout %d", s.Flags, s.Timeout)
		}
		for _, t := range s.to {
			line += fmt.Sprintf(" %s=%d", t.addr, t.weight)
		}
		lines = append(lines, line)
	}
	for _, a := range p.addrs {
		lines = append(lines, "address "+a.String())
	}
	for _, m := range p.members {
		line := m.set.String()
		if m.addr.IsValid() {
			line += " " + m.addr.String()
		}
		if m.port != 0 {
			line += fmt.Sprintf(" %d:%d", uint8(m.protocol), m.port)
		}
		if m.from.IsValid() {
			line += " " + m.from.String()
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n") + "\n"
}

func TestPlan(t *testing.T) {
	pods := proxier.Detector{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:10:244:1::/64")}}
	node := netip.MustParseAddr("172.18.0.1")
	rules := proxier.NodeRules{LocalAddrs: []netip.Addr{node}, NodePortAddrs: []netip.Addr{node}, Pods: pods}
	internal := [proxier.Origins]proxier.Route{{}, {Source: proxier.Masquerade}, {Source: proxier.Masquerade}}
	local := [proxier.Origins]proxier.Route{{}, {Source: proxier.Masquerade}, {Set: proxier.V4Local}}
	at := netip.MustParseAddrPort
	here := proxier.Backend{Addr: at("10.244.1.1:8080"), Members: proxier.InCluster | proxier.InLocal, Local: true, Weight: 100}
	there := proxier.Backend{Addr: at("10.244.2.1:8080"), Members: proxier.InCluster, Weight: 100}
	heavy := proxier.Backend{Addr: at("10.244.3.1:8080"), Members: proxier.InCluster, Weight: 300}
	clusterIP := proxier.Frontend{Addr: at("10.96.0.10:80"), Kind: proxier.ClusterIP, Routes: internal}
	balanced := proxier.Frontend{Addr: at("203.0.113.10:80"), Kind: proxier.LoadBalancer, Routes: hidden}
	nodePort := proxier.Frontend{Addr: at("0.0.0.0:30080"), Kind: proxier.NodePort, Routes: hidden}
	guarded := balanced
	guarded.Filtered, guarded.Ranges = true, []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("203.0.113.10/32")}
	balancedLocal, nodePortLocal := balanced, nodePort
	balancedLocal.Routes, nodePortLocal.Routes = local, local
	external := proxier.Frontend{Addr: at("203.0.113.20:80"), Kind: proxier.ExternalIP, Routes: hidden}
	own := proxier.Frontend{Addr: at("172.18.0.1:80"), Kind: proxier.ExternalIP, Routes: hidden}
	rival := proxier.ServicePortName{}
	elsewhere := proxier.Frontend{Addr: at("172.18.0.9:80"), Kind: proxier.ExternalIP, Routes: hidden}
	announced := proxier.Frontend{Addr: at("172.18.0.9:81"), Kind: proxier.LoadBalancer, Routes: hidden}
	conflict := external
	conflict.Conflict = &rival

	tests := []struct {
		name      string
		opts      Options
		protocol  proxier.Protocol
		affinity  time.Duration
		frontends []proxier.Frontend
		backends  []proxier.Backend
		silent    bool // without an endpoint
		check     uint16
		loopback  bool
		algorithm proxier.Algorithm
		want      string
		rules     string // of these frontends
	}{
		{name: "a ClusterIP", frontends: []proxier.Frontend{clusterIP}, backends: []proxier.Backend{here, there}, want: `
KUBE-CLUSTER-IP 10.96.0.10 6:80
KUBE-IPVS-IPS 10.96.0.10
KUBE-LOOP-BACK 10.244.1.1 6:8080 10.244.1.1/32
address 10.96.0.10
server 10.96.0.10:80/TCP rr 10.244.1.1:8080=1 10.244.2.1:8080=1
`},
		{name: "of UDP, with an endpoint that keeps its clients", protocol: proxier.UDP, frontends: []proxier.Frontend{clusterIP},
			backends: []proxier.Backend{{Addr: here.Addr, Weight: 100}, there}, want: `
KUBE-CLUSTER-IP 10.96.0.10 17:80
KUBE-IPVS-IPS 10.96.0.10
address 10.96.0.10
server 10.96.0.10:80/UDP rr 10.244.1.1:8080=0 10.244.2.1:8080=1
`},
		{name: "weights", frontends: []proxier.Frontend{clusterIP}, backends: []proxier.Backend{heavy, there}, want: `
KUBE-CLUSTER-IP 10.96.0.10 6:80
KUBE-IPVS-IPS 10.96.0.10
address 10.96.0.10
server 10.96.0.10:80/TCP wrr 10.244.3.1:8080=300 10.244.2.1:8080=100
`},
		{name: "weights with least connections", opts: Options{Scheduler: "lc"}, frontends: []proxier.Frontend{clusterIP}, backends: []proxier.Backend{heavy, there}, want: `
KUBE-CLUSTER-IP 10.96.0.10 6:80
KUBE-IPVS-IPS 10.96.0.10
address 10.96.0.10
server 10.96.0.10:80/TCP wlc 10.244.3.1:8080=300 10.244.2.1:8080=100
`},
		{name: "maglev", algorithm: proxier.Maglev, frontends: []proxier.Frontend{clusterIP}, backends: []proxier.Backend{there}, want: `
KUBE-CLUSTER-IP 10.96.0.10 6:80
KUBE-IPVS-IPS 10.96.0.10
address 10.96.0.10
server 10.96.0.10:80/TCP mh flags 0x18 timeout 0 10.244.2.1:8080=1
`},
		{name: "external addresses", opts: Options{Scheduler: "mh"}, frontends: []proxier.Frontend{guarded, external, own, conflict, nodePort}, backends: []proxier.Backend{there}, want: `
KUBE-EXTERNAL-IP 172.18.0.1 1:2048
KUBE-EXTERNAL-IP 172.18.0.1 6:80
KUBE-EXTERNAL-IP 203.0.113.20 1:2048
KUBE-EXTERNAL-IP 203.0.113.20 6:80
KUBE-IPVS-IPS 203.0.113.10
KUBE-IPVS-IPS 203.0.113.20
KUBE-LOAD-BALANCER 203.0.113.10 1:2048
KUBE-LOAD-BALANCER 203.0.113.10 6:80
KUBE-LOAD-BALANCER-FW 203.0.113.10 6:80
KUBE-LOAD-BALANCER-SOURCE-CIDR 203.0.113.10 6:80 198.51.100.0/24
KUBE-LOAD-BALANCER-SOURCE-IP 203.0.113.10 6:80 203.0.113.10/32
KUBE-NODE-PORT-TCP 0:30080
address 203.0.113.10
address 203.0.113.20
server 172.18.0.1:30080/TCP mh flags 0x18 timeout 0 10.244.2.1:8080=1
server 172.18.0.1:80/TCP mh flags 0x18 timeout 0 10.244.2.1:8080=1
server 203.0.113.10:80/TCP mh flags 0x18 timeout 0 10.244.2.1:8080=1
server 203.0.113.20:80/TCP mh flags 0x18 timeout 0 10.244.2.1:8080=1
`},
		{name: "a NodePort of SCTP", protocol: proxier.SCTP, frontends: []proxier.Frontend{nodePort}, want: `
KUBE-NODE-PORT-SCTP-HASH 172.18.0.1 132:30080
server 172.18.0.1:30080/SCTP rr
`},
		{name: "NodePorts at loopback addresses, too", frontends: []proxier.Frontend{nodePort}, loopback: true, want: `
KUBE-NODE-PORT-TCP 0:30080
server 172.18.0.1:30080/TCP rr
`, rules: "0.0.0.0:30080"},
		{name: "one address with affinity", affinity: time.Hour, frontends: []proxier.Frontend{clusterIP}, want: `
KUBE-CLUSTER-IP 10.96.0.10 6:80
KUBE-IPVS-IPS 10.96.0.10
address 10.96.0.10
server 10.96.0.10:80/TCP rr flags 0x1 timeout 3600
`},
		{name: "several with affinity", affinity: time.Hour, frontends: []proxier.Frontend{clusterIP, nodePort}, want: "nothing\n", rules: "10.96.0.10:80 0.0.0.0:30080"},
		{name: "the same, as upstream", opts: Options{UpstreamSemantics: true}, affinity: time.Hour, frontends: []proxier.Frontend{nodePort, conflict}, want: `
KUBE-NODE-PORT-TCP 0:30080
server 172.18.0.1:30080/TCP rr flags 0x1 timeout 3600
`},
		{name: "a Local policy", frontends: []proxier.Frontend{clusterIP, balancedLocal, nodePortLocal}, backends: []proxier.Backend{here, there}, want: `
KUBE-CLUSTER-IP 10.96.0.10 6:80
KUBE-IPVS-IPS 10.96.0.10
KUBE-LOOP-BACK 10.244.1.1 6:8080 10.244.1.1/32
address 10.96.0.10
server 10.96.0.10:80/TCP rr 10.244.1.1:8080=1 10.244.2.1:8080=1
`, rules: "203.0.113.10:80 0.0.0.0:30080"},
		{name: "the same, as upstream", opts: Options{UpstreamSemantics: true}, frontends: []proxier.Frontend{balancedLocal, nodePortLocal}, backends: []proxier.Backend{here, there}, want: `
KUBE-IPVS-IPS 203.0.113.10
KUBE-LOAD-BALANCER 203.0.113.10 1:2048
KUBE-LOAD-BALANCER 203.0.113.10 6:80
KUBE-LOAD-BALANCER-LOCAL 203.0.113.10 6:80
KUBE-LOOP-BACK 10.244.1.1 6:8080 10.244.1.1/32
KUBE-NODE-PORT-LOCAL-TCP 0:30080
KUBE-NODE-PORT-TCP 0:30080
address 203.0.113.10
server 172.18.0.1:30080/TCP rr 10.244.1.1:8080=1
server 203.0.113.10:80/TCP rr 10.244.1.1:8080=1
`},
		{name: "and with no endpoint here", opts: Options{UpstreamSemantics: true}, frontends: []proxier.Frontend{nodePortLocal}, backends: []proxier.Backend{there}, silent: true, want: `
KUBE-NODE-PORT-LOCAL-TCP 0:30080
KUBE-NODE-PORT-TCP 0:30080
server 172.18.0.1:30080/TCP rr 10.244.2.1:8080=1
`},
		{name: "addresses of the link", frontends: []proxier.Frontend{elsewhere, announced, own}, want: `
KUBE-EXTERNAL-IP 172.18.0.1 1:2048
KUBE-EXTERNAL-IP 172.18.0.1 6:80
server 172.18.0.1:80/TCP rr
`, rules: "172.18.0.9:80 172.18.0.9:81"},
		{name: "addresses of the link, for which no other machine answers", opts: Options{StrictARP: true}, frontends: []proxier.Frontend{elsewhere, announced}, want: `
KUBE-IPVS-IPS 172.18.0.9
KUBE-LOAD-BALANCER 172.18.0.9 1:2048
KUBE-LOAD-BALANCER 172.18.0.9 6:81
address 172.18.0.9
server 172.18.0.9:81/TCP rr
`, rules: "172.18.0.9:80"},
		{name: "silence", frontends: []proxier.Frontend{clusterIP}, silent: true, want: "nothing\n", rules: "10.96.0.10:80"},
		{name: "a health check, though rules carry the frontends", check: 32000, frontends: []proxier.Frontend{clusterIP, balancedLocal}, silent: true, want: `
KUBE-6-HEALTH-CHECK-NODE-PORT 0:32000
KUBE-HEALTH-CHECK-NODE-PORT 0:32000
`, rules: "10.96.0.10:80 203.0.113.10:80"},
		{name: "a source that the rules would not show", opts: Options{MasqueradeAll: true}, frontends: []proxier.Frontend{clusterIP, nodePort}, want: `
KUBE-NODE-PORT-TCP 0:30080
server 172.18.0.1:30080/TCP rr
`, rules: "10.96.0.10:80"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := planner{opts: &tt.opts, nodeRules: rules, links: []netip.Prefix{netip.MustParsePrefix("172.18.0.0/16")}}
			if tt.loopback {
				p.nodeRules.Loopback[proxier.IPv4] = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
			}
			name := proxier.ServicePortName{Protocol: proxier.TCP}
			if tt.protocol != 0 {
				name.Protocol = tt.protocol
			}
			d := proxiertest.Decision(name, 0)
			d.Frontends, d.Backends, d.Affinity, d.HealthCheckNodePort = tt.frontends, tt.backends, tt.affinity, tt.check
			d.Balancing.Algorithm = tt.algorithm
			for i := range d.Backends {
				d.Weighted = d.Weighted || d.Backends[i].Weight != d.Backends[0].Weight
			}
			if tt.silent {
				d.Empty = [proxier.Sets]proxier.Verdict{proxier.Drop, proxier.Drop, proxier.Drop, proxier.Drop}
			}
			if diff := cmp.Diff(strings.TrimPrefix(tt.want, "\n"), p.plan(d).text()); diff != "" {
				t.Error(diff)
			}
			var ruled []string
			if share := p.assign(d); share != nil {
				for i := range share.Frontends {
					ruled = append(ruled, share.Frontends[i].Addr.String())
				}
			}
			if got := strings.Join(ruled, " "); got != tt.rules {
				t.Errorf("rules serve %q, want %q", got, tt.rules)
			}
		})
	}
}

// TestSetNames: names fit into the kernel, and no two are the same.
func TestSetNames(t *testing.T) {
	seen := map[string]bool{}
	for f := range proxier.Families {
		for name := range setNames {
			text := set{name, f}.String()
			if seen[text] || len(text) > maxSetName {
				t.Errorf("%s of %s is not one", text, f)
			}
			seen[text] = true
		}
	}
	if got := (set{loadBalancerSourceCIDR, proxier.IPv6}).String(); got != "KUBE-6-LOAD-BALANCER-SOURCE-CID" {
		t.Error(got)
	}
}

func TestSettings(t *testing.T) {
	for kernel, want := range map[string]string{"5.8.0-1-amd64": "0", "5.9.0": "1", "4.19.0": "0", "6.1.0-50-cloud-amd64": "1", "10.0": "1", "?": "1"} {
		o := Options{StrictARP: true}
		got := map[string]string{}
		for _, s := range o.settings(kernel) {
			got[s.name] = s.value
		}
		if got["net/ipv4/vs/conn_reuse_mode"] != want || got["net/ipv4/conf/all/arp_ignore"] != "1" || len(got) != 7 {
			t.Errorf("%s: %v", kernel, got)
		}
	}
}

// TestMissingScheduler: where the kernel lacks the scheduler that weights need, the configured one serves.
func TestMissingScheduler(t *testing.T) {
	k := newFakeKernel()
	k.Lacks = map[string]bool{"wrr": true, "mh": true}
	opts := Options{}
	s := newServers(serversOf(k), &opts)
	key := keyOf(netip.MustParseAddrPort("10.96.0.10:80"), proxier.TCP)
	to := []target{{netip.MustParseAddrPort("10.244.1.1:8080"), 300}, {netip.MustParseAddrPort("10.244.2.1:8080"), 100}}
	want := func(scheduler string, flags uint32) {
		t.Helper()
		if err := s.ensure(context.Background(), key); err != nil {
			t.Fatal(err)
		}
		is := k.Servers[key]
		if is.Scheduler != scheduler || is.Flags != flags || len(is.To) != len(to) || is.To[to[0].addr].Weight != 300 {
			t.Errorf("the kernel has %+v, want the scheduler %s", is, scheduler)
		}
	}
	claims := func(scheduler string) []claimed {
		return []claimed{{key, &claim{server: scheduled(server{}, scheduler), to: to}}}
	}
	first := claims("wrr")
	s.claim(first)
	want("rr", 0)
	s.claim(claims("mh"))
	s.release(first)
	want("rr", 0)
	delete(k.Lacks, "mh")
	if err := s.read(); err != nil { // as with every full sync
		t.Fatal(err)
	}
	want("mh", flagHashPort|flagHashFallback)
}

// A kind without a row would be in no set, and the constant rules would not know its addresses.
func TestKindsHaveSets(t *testing.T) {
	for _, k := range proxier.Kinds() {
		row, is := kindOf[k]
		switch {
		case k.Wildcard():
			if is {
				t.Errorf("%s is a wildcard: its sets are those of the protocol", k)
			}
		case len(row.masqueraded) == 0 || len(row.kept) == 0:
			t.Errorf("%s has no sets: %+v", k, row)
		case row.foreign && !k.External():
			t.Errorf("%s is from the ServiceCIDRs, and no other machine has its address", k)
		}
	}
}
