// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"bytes"
	"context"
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/sources/manifests"
	"github.com/tandem-proxy/tandem/test/golden"
)

// noTier takes decisions and does nothing.
type noTier struct{}

func (noTier) Sync(context.Context, proxier.Update) error          { return nil }
func (noTier) Cleanup(context.Context) error                       { return nil }
func (noTier) Supports(*proxier.Decision, *proxier.Frontend) error { return nil }

// makeTable reads testdata/cluster.yaml for node1.
func makeTable(t *testing.T, pods proxier.Detector) *proxier.Table {
	t.Helper()
	facts := proxier.Facts{
		Zone: "z1", Pods: pods,
		NodeIPs:      [proxier.Families]netip.Addr{netip.MustParseAddr("172.18.0.1"), netip.MustParseAddr("fd00:18::1")},
		LocalAddrs:   []netip.Addr{netip.MustParseAddr("172.18.0.1"), netip.MustParseAddr("fd00:18::1")},
		ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")},
	}
	report := proxier.ReporterFunc(func(p proxier.Problem) {
		if p.Reason == proxier.ReasonInvalidFile || p.Reason == proxier.ReasonInvalidObject {
			t.Errorf("problem: %+v", p)
		}
	})
	px, err := proxier.New(proxier.Options{
		NodeName: "node1", Facts: facts, NodeFacts: func(*v1.Node, *proxier.Facts) {},
		Tier: noTier{}, Runner: proxier.DefaultRunnerOptions(), Reporter: report,
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := manifests.New("testdata", px, report, manifests.Options{}).Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := px.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	return px.Table()
}

var podCIDRs = proxier.Detector{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")}}

func serves(*proxier.Explanation) []Tier { return []Tier{{Name: "ebpf", Carries: true}} }

func TestGolden(t *testing.T) {
	bridge := proxier.Detector{Interface: "cni", InterfacePrefix: true}
	refuses := func(e *proxier.Explanation) []Tier {
		return []Tier{{Name: "ebpf", Detail: "no " + e.Frontend.Kind.String()}, {Name: "iptables", Carries: true, Detail: "slower"}}
	}
	for _, test := range []struct {
		name, source, destination, protocol, device string
		pods                                        proxier.Detector
		tiers                                       Tiers
	}{
		{"pod", "10.244.1.7:40000", "10.96.0.10:80", "", "", podCIDRs, serves}, // and an endpoint
		{"host", "127.0.0.1", "10.96.0.10:80", "TCP", "", podCIDRs, nil},
		{"ipv6", "fd00:10:244:1::7", "[fd00:10:96::10]:80", "tcp", "", podCIDRs, nil},
		{"any-source", "10.244.1.1", "172.18.0.1:30080", "", "", podCIDRs, refuses},
		{"admitted", "198.51.100.7", "203.0.113.9:80", "", "eth0", podCIDRs, nil},
		{"not-admitted", "198.51.101.7", "203.0.113.9:80", "", "eth0", podCIDRs, nil},
		{"unguarded", "2001:db8:51:100::7", "[2001:db8:203:113::9]:80", "", "eth0", podCIDRs, nil},
		{"rivals", "198.51.100.7", "203.0.113.20:80", "", "eth0", podCIDRs, nil},
		{"local-drop", "198.51.100.7", "203.0.113.12:53", "udp", "eth0", podCIDRs, nil},
		{"local-error", "198.51.100.7", "203.0.113.12:53", "udp", "", podCIDRs, nil},
		{"no-endpoints", "172.18.0.1", "10.96.0.11:80", "", "", podCIDRs, nil},
		{"maglev", "198.51.100.7:40000", "172.18.0.1:30081", "", "eth0", podCIDRs, nil},
		{"maglev-without-a-port", "198.51.100.7", "172.18.0.1:30081", "", "eth0", podCIDRs, nil},
		{"maglev-of-a-client", "198.51.100.7", "172.18.0.1:30082", "", "eth0", podCIDRs, nil},
		{"unserved", "172.18.0.1", "10.96.0.10:81", "", "", podCIDRs, nil},
		{"pass", "172.18.0.1", "192.0.2.1:80", "sctp", "", proxier.Detector{}, nil},
		{"no-nodeport-here", "172.18.0.1", "172.18.0.2:30080", "", "", proxier.Detector{}, nil},
		{"no-pod-detector", "10.244.1.7", "10.96.0.10:80", "", "", proxier.Detector{}, nil},
		{"device-of-pods", "10.244.1.7", "10.96.0.10:80", "", "cni3", bridge, nil},
		{"another-device", "10.244.1.7", "10.96.0.10:80", "", "eth0", bridge, nil},
		{"no-device", "10.244.1.7", "10.96.0.10:80", "", "", bridge, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			flow, err := ParseFlow(test.source, test.destination, test.protocol, test.device)
			if err != nil {
				t.Fatal(err)
			}
			e := Of("node1", makeTable(t, test.pods), flow, test.tiers)
			var text bytes.Buffer
			if err := e.WriteText(&text); err != nil {
				t.Fatal(err)
			}
			golden.Compare(t, test.name+"-text.golden", text.String())
			data, err := json.MarshalIndent(e, "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			golden.Compare(t, test.name+"-json.golden", string(data)+"\n")
			// tandemctl prints what it read.
			var again Explanation
			if err := json.Unmarshal(data, &again); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(e, &again, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); d != "" {
				t.Errorf("after a round trip (-want +got):\n%s", d)
			}
		})
	}
}

// TestReadme: the README shows what the command says.
func TestReadme(t *testing.T) {
	const source, destination = "10.244.1.7", "10.96.0.10:80"
	flow, err := ParseFlow(source, destination, "", "")
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	if err := Of("node1", makeTable(t, podCIDRs), flow, serves).WriteText(&text); err != nil {
		t.Fatal(err)
	}
	golden.Shown(t, "../../README.md", "tandemctl explain "+source+" "+destination, text.String())
}

func TestParseFlow(t *testing.T) {
	for _, test := range []struct{ source, destination, protocol, device, want string }{
		{"10.0.0.1", "10.96.0.1:80", "", "", "10.0.0.1:0 10.96.0.1:80 TCP "},
		{"10.0.0.1:5", "10.96.0.1:80", "udp", "eth0", "10.0.0.1:5 10.96.0.1:80 UDP eth0"},
		{"fd00::1", "[fd00::2]:80", "Sctp", "", "[fd00::1]:0 [fd00::2]:80 SCTP "},
		{"[fd00::1]", "[fd00::2]:80", "", "", "[fd00::1]:0 [fd00::2]:80 TCP "},
		{"[fd00::1]:5", "[fd00::2]:80", "", "", "[fd00::1]:5 [fd00::2]:80 TCP "},
		{"::ffff:10.0.0.1", "[::ffff:10.96.0.1]:80", "", "", "10.0.0.1:0 10.96.0.1:80 TCP "},

		{"", "10.96.0.1:80", "", "", `source "": want an IP address`},
		{"pod", "10.96.0.1:80", "", "", `source "pod": want an IP address`},
		{"10.0.0.1:99999", "10.96.0.1:80", "", "", "want an IP address and optionally a port"},
		{"fe80::1%eth0", "[fd00::2]:80", "", "", "without a zone"},
		{"10.0.0.1", "10.96.0.1", "", "", `destination "10.96.0.1": want a port too`},
		{"10.0.0.1", "10.96.0.1:0", "", "", "from 1 to 65535"},
		{"fd00::1", "fd00::2", "", "", "want a port too, as in 10.96.0.10:80 or [fd00::10]:80"},
		{"fd00::1", "fd00::2::80", "", "", "want an IP address and a port"},
		{"10.0.0.1", "web:80", "", "", "want an IP address and a port"},
		{"10.0.0.1", "[fd00::2]:80", "", "", "different address families"},
		{"10.0.0.1", "10.96.0.1:80", "icmp", "", `unknown protocol "icmp": want tcp, udp or sctp`},
		{"10.0.0.1", "10.96.0.1:80", "", "a name that is too long", "not the name of a network device"},
		{"10.0.0.1", "10.96.0.1:80", "", "../x", "not the name of a network device"},
	} {
		flow, err := ParseFlow(test.source, test.destination, test.protocol, test.device)
		got := strings.Join([]string{flow.Source.String(), flow.Destination.String(), flow.Protocol.String(), flow.Device}, " ")
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, test.want) || err == nil && got != test.want {
			t.Errorf("%q: got %q, want %q", test, got, test.want)
		}
	}
}

func TestSplitDestination(t *testing.T) {
	for text, want := range map[string]string{
		"10.96.0.1:80":      "10.96.0.1:80 ",
		"10.96.0.1:53/udp":  "10.96.0.1:53 udp",
		"[fd00::1]:53/UDP":  "[fd00::1]:53 UDP",
		"10.96.0.1:53/":     "after the slash",
		"10.96.0.1:53/udp/": "10.96.0.1:53 udp/", // ParseFlow complains
	} {
		addrPort, protocol, err := SplitDestination(text)
		got := addrPort + " " + protocol
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, want) {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

// Whatever is asked, it is refused or a flow of one family that can be told again.
func FuzzParseFlow(f *testing.F) {
	f.Add("10.0.0.1:5", "10.96.0.1:80", "udp", "eth0")
	f.Add("[fd00::1]", "[fd00::2]:80", "", "")
	f.Fuzz(func(t *testing.T, source, destination, protocol, device string) {
		flow, err := ParseFlow(source, destination, protocol, device)
		if err != nil {
			return
		}
		again, err := ParseFlow(flow.Source.String(), flow.Destination.String(), flow.Protocol.String(), flow.Device)
		if err != nil || again != flow || flow.Source.Addr().Is4() != flow.Destination.Addr().Is4() {
			t.Fatalf("%+v, again %+v, error %v", flow, again, err)
		}
	})
}
