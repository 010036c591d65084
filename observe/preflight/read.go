// SPDX-License-Identifier: Apache-2.0

//go:build linux

package preflight

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/attached"
	"github.com/tandem-proxy/tandem/kernel/hostfilter"
	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/ipvs"
	"github.com/tandem-proxy/tandem/kernel/nftables"
	"github.com/tandem-proxy/tandem/kernel/xtables"
)

// Options say where to look.
type Options struct {
	// CgroupRoot is the cgroup2 hierarchy; empty if there is none.
	CgroupRoot string
	// Health and Metrics are the addresses at which kube-proxy serves. An unspecified address
	// stands for loopback.
	Health, Metrics netip.AddrPort
	// Other is where another kube-proxy that is to stay serves metrics; the zero value if none is.
	Other netip.AddrPort
}

// Read reads facts in the network namespace of the process. It changes nothing. It needs CAP_NET_ADMIN
// for rules, and CAP_SYS_ADMIN for programs; what it cannot read is in Unseen.
func Read(ctx context.Context, o Options) *Facts {
	f := &Facts{}
	links := f.readDevices()
	f.readRules(ctx)
	f.readChains(ctx)
	servers, err := ipvs.Servers(ipvs.ThreadNet)
	f.VirtualServers = len(servers)
	f.unseen("virtual servers of IPVS", err)
	if o.CgroupRoot == "" {
		f.unseen("BPF programs on cgroups", errors.New("found no cgroup2 hierarchy"))
	} else {
		on, err := attached.Cgroups(o.CgroupRoot)
		f.Programs = append(f.Programs, on...)
		f.unseen("BPF programs on cgroups", err)
	}
	on, err := attached.Devices(links)
	f.Programs = append(f.Programs, on...)
	f.unseen("BPF programs on devices", err)
	f.readPolicies()
	f.Servers = append(readServer(ctx, RoleHealth, o.Health), readServer(ctx, RoleMetrics, o.Metrics)...)
	if f.Shared = o.Other.IsValid(); f.Shared {
		f.Servers = append(f.Servers, readServer(ctx, RoleOther, o.Other)...)
	}
	return f
}

func (f *Facts) unseen(what string, err error) {
	if err != nil {
		f.Unseen = append(f.Unseen, Unseen{what, strings.Join(strings.Fields(err.Error()), " ")})
	}
}

func (f *Facts) readDevices() []netlink.Link {
	links, err := netlink.LinkList()
	f.unseen("network devices", err)
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	f.unseen("addresses of network devices", err)
	for _, l := range links {
		d := Device{Name: l.Attrs().Name, Type: l.Type()}
		for _, a := range addrs {
			if ip, ok := netip.AddrFromSlice(a.IP); ok && a.LinkIndex == l.Attrs().Index {
				d.Addrs = append(d.Addrs, ip.Unmap())
			}
		}
		f.Devices = append(f.Devices, d)
	}
	return links
}

func (f *Facts) readRules(ctx context.Context) {
	for _, v := range []xtables.Variant{xtables.NFT, xtables.Legacy} {
		tools, err := xtables.New(v)
		if err != nil {
			f.unseen("rules of iptables, variant "+v.String(), err)
			continue
		}
		for family := range inet.Families {
			tables, err := tools.Existing(ctx, family)
			f.unseen(fmt.Sprintf("rules of iptables, variant %s, %s", v, family), err)
			for _, t := range tables {
				f.Rules = append(f.Rules, Rules{Variant: v.String(), Family: family.String(), Table: t})
			}
		}
	}
}

// iptablesTables are those that the nft variant of iptables writes.
var iptablesTables = []string{"raw", "mangle", "nat", "filter", "security"}

func (f *Facts) readChains(ctx context.Context) {
	chains, err := nftables.Chains(ctx)
	f.unseen("rules of nf_tables", err)
	for _, c := range chains {
		if (c.Family == "ip" || c.Family == "ip6") && slices.Contains(iptablesTables, c.Table) {
			continue
		}
		f.Chains = append(f.Chains, c)
	}
	filters, err := hostfilter.Read(ctx)
	f.BeforeDNAT, f.Firewalls = filters.BeforeDNAT, filters.Firewalls
	f.unseen("filters of the host", err)
}

func (f *Facts) readPolicies() {
	list, err := netlink.XfrmPolicyList(netlink.FAMILY_ALL)
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EINVAL) {
		return
	}
	f.unseen("policies of IPsec", err)
	f.XfrmPolicies = len(list)
}

const (
	answerTime = 2 * time.Second
	answerSize = 4096
)

var loopbacks = [...]netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}

// readServer asks what listens at an address; nothing does if it is not in the result.
func readServer(ctx context.Context, role string, at netip.AddrPort) (list []Server) {
	if at.Port() == 0 {
		return nil
	}
	hosts := []netip.Addr{at.Addr()}
	if at.Addr().IsUnspecified() {
		hosts = loopbacks[:]
	}
	for _, host := range hosts {
		s := Server{Role: role, Address: netip.AddrPortFrom(host, at.Port())}
		if s.ask(ctx); s.Listening {
			return []Server{s}
		}
	}
	return nil
}

// AskMetrics asks what listens at the address of metrics. It is the zero value if nothing does.
func AskMetrics(ctx context.Context, at netip.AddrPort) Server {
	for _, s := range readServer(ctx, RoleMetrics, at) {
		return s
	}
	return Server{}
}

func (s *Server) ask(ctx context.Context) {
	conn, err := (&net.Dialer{Timeout: answerTime}).DialContext(ctx, "tcp", s.Address.String())
	if err != nil {
		return
	}
	conn.Close()
	s.Listening = true
	if s.Role == RoleHealth {
		status, body := get(ctx, s.Address, "/healthz")
		var answer struct{ LastUpdated *string }
		s.KubeProxy = status != 0 && json.Unmarshal([]byte(body), &answer) == nil && answer.LastUpdated != nil
		return
	}
	status, body := get(ctx, s.Address, "/proxyMode")
	mode := strings.TrimSpace(body)
	if s.KubeProxy = status == http.StatusOK && slices.Contains([]string{"iptables", "ipvs", "nftables", "ebpf"}, mode); !s.KubeProxy {
		return
	}
	s.Mode = mode
	status, _ = get(ctx, s.Address, "/debug/explain")
	s.Tandem = status != 0 && status != http.StatusNotFound
}

// get returns the beginning of an answer, and status 0 without one.
func get(ctx context.Context, at netip.AddrPort, path string) (status int, body string) {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+at.String()+path, nil)
	if err != nil {
		return 0, ""
	}
	// Not the default transport, which may use an HTTP proxy.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		return 0, ""
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(response.Body, answerSize))
	return response.StatusCode, string(text)
}
