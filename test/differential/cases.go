// SPDX-License-Identifier: Apache-2.0

package differential

import (
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
	"k8s.io/apimachinery/pkg/types"

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
//
// Comments are lines that begin with #, and what follows #! in a line.
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
