// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/kernel/attached"
	"github.com/tandem-proxy/tandem/kernel/hostfilter"
	"github.com/tandem-proxy/tandem/kernel/nftables"
	"github.com/tandem-proxy/tandem/kernel/xtables"
)

// Facts are what Read read on this node. What could not be read is empty, and in Unseen.
type Facts struct {
	// Devices of the host's network namespace.
	Devices []Device
	// Rules are the tables of iptables, in both variants and families.
	Rules []Rules
	// Chains are those of nf_tables but for the tables of iptables.
	Chains []nftables.Chain
	// BeforeDNAT are rules that filter packets before their destination is translated.
	BeforeDNAT []hostfilter.Rule
	// Firewalls forward only connections that netfilter translates.
	Firewalls []hostfilter.Firewall
	// Servers are the ports that a kube-proxy listens at.
	Servers []Server
	// VirtualServers counts those of IPVS.
	VirtualServers int
	// Programs are the BPF programs on cgroups and devices.
	Programs []attached.Program
	// XfrmPolicies counts the policies of IPsec, but for those of sockets.
	XfrmPolicies int
	// Programmable says that mode ebpf would run.
	Programmable bool
	// Shared says that another kube-proxy is to stay on this node.
	Shared bool
	// Uplinks are the devices on which clients outside the node would be served by programs.
	Uplinks []string
	// ClusterIPs are the Services with a ClusterIP, by namespace/name.
	ClusterIPs map[netip.Addr]string
	// Unseen says what could not be read.
	Unseen []Unseen
}

// Device is a network device.
type Device struct {
	Name string
	// Type is that of ip-link(8): veth, vxlan, wireguard; or device for hardware.
	Type  string
	Addrs []netip.Addr
}

// Rules is a table of iptables.
type Rules struct {
	// Variant is nft or legacy, and Family IPv4 or IPv6.
	Variant, Family string
	*xtables.Table
}

// Server is what answers at a port of kube-proxy on this node.
type Server struct {
	// Role is RoleHealth, RoleMetrics, or RoleOther for the port of metrics of another kube-proxy
	// that is to stay.
	Role    string
	Address netip.AddrPort
	// Listening says that something accepts connections, and KubeProxy that its answers are
	// those of a kube-proxy.
	Listening, KubeProxy bool
	// Tandem says that it is this project's kube-proxy, and Mode is its mode. Both come from
	// the port of metrics.
	Tandem bool
	Mode   string
}

// Roles of servers.
const (
	RoleHealth  = "health"
	RoleMetrics = "metrics"
	RoleOther   = "other"
)

// Unseen is something that could not be read.
type Unseen struct {
	What string `json:"what"`
	Why  string `json:"why"`
}

// device returns the first device that has a name, or with a + at its end begins with it; of any
// of the types, if there are any.
func (f *Facts) device(name string, types ...string) (found string) {
	prefix, open := strings.CutSuffix(name, "+")
	for _, d := range f.Devices {
		if (d.Name == name || open && strings.HasPrefix(d.Name, prefix)) && (len(types) == 0 || slices.Contains(types, d.Type)) {
			return d.Name
		}
	}
	return ""
}

// ofType lists the devices of a type.
func (f *Facts) ofType(kind string) (names []string) {
	for _, d := range f.Devices {
		if d.Type == kind {
			names = append(names, d.Name)
		}
	}
	return names
}

// chain returns the first chain of iptables that has a name, or with a + at its end begins with
// it. The name is preceded by that of the table.
func (f *Facts) chain(name string) string {
	prefix, open := strings.CutSuffix(name, "+")
	for _, t := range f.Rules {
		for i := range t.Chains {
			if c := &t.Chains[i]; c.Name == name || open && strings.HasPrefix(c.Name, prefix) {
				return fmt.Sprintf("%s of iptables (%s, table %s)", c.Name, t.Variant, t.Name)
			}
		}
	}
	return ""
}

// table returns the first table of nf_tables that has a name, or with a + at its end begins with
// it.
func (f *Facts) table(name string) string {
	prefix, open := strings.CutSuffix(name, "+")
	for _, c := range f.Chains {
		if c.Table == name || open && strings.HasPrefix(c.Table, prefix) {
			return c.Family + " " + c.Table
		}
	}
	return ""
}

// program returns the first program whose name begins with a prefix; on cgroups or on devices.
func (f *Facts) program(prefix string, cgroup bool) (found attached.Program, ok bool) {
	i := slices.IndexFunc(f.Programs, func(p attached.Program) bool {
		return strings.HasPrefix(p.Name, prefix) && (p.Cgroup != "") == cgroup
	})
	if i < 0 {
		return found, false
	}
	return f.Programs[i], true
}

// signs joins what was found, and is empty if nothing was.
func signs(list ...string) string {
	return strings.Join(slices.DeleteFunc(list, func(s string) bool { return s == "" }), ", ")
}

// sign is a word and a name; empty without a name.
func sign(word, name string) string {
	if name == "" {
		return ""
	}
	return word + " " + name
}
