// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/test/configmap"
	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/lab"
)

// clusterIPService has one port; older ones have lower numbers.
func clusterIPService(number int, protocol v1.Protocol, change func(*v1.Service)) *v1.Service {
	s := nodePortService(fmt.Sprintf("s%d", number), fmt.Sprintf("10.96.0.%d", number), 0)
	s.UID = types.UID("uid-of-" + s.Name)
	s.CreationTimestamp = metav1.NewTime(time.Unix(1_700_000_000+int64(number), 0))
	s.Spec.Type, s.Spec.Ports[0].Protocol = v1.ServiceTypeClusterIP, protocol
	if change != nil {
		change(s)
	}
	return s
}

// allEvents returns the Events of an API, sorted. Repeated ones are marked.
func allEvents(api *fakeapi.API) (lines []string) {
	for _, e := range api.Events() {
		uid := ""
		if string(e.Regarding.UID) != e.Regarding.Name {
			uid = " " + string(e.Regarding.UID)
		}
		again := ""
		if e.Series != nil {
			again = " again"
		}
		lines = append(lines, fmt.Sprintf("%s %s %s%s by %s, %s%s", e.Type, e.Reason, e.Regarding.Kind+"/"+e.Regarding.Name, uid, e.ReportingController, e.Action, again))
	}
	slices.Sort(lines)
	return lines
}

// All kinds of Events are written once, about the right object.
func TestEvents(t *testing.T) {
	const tiny = 8 // capacity for frontends
	l := lab.NewT(t)
	n := l.Node("node1")
	volume := t.TempDir()
	const config = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: ebpf\nconntrack: {maxPerCore: 0}\noomScoreAdj: 0\nlogging: {verbosity: 3}\n"
	if err := configmap.Update(volume, map[string]string{"config.conf": config}); err != nil {
		t.Fatal(err)
	}
	external := func(s *v1.Service) { s.Spec.ExternalIPs = []string{"203.0.113.20"} }
	api := fakeapi.New(
		&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}, Status: v1.NodeStatus{Addresses: []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: n.Addr4.String()}}}},
		clusterIPService(1, v1.ProtocolTCP, external), clusterIPService(2, v1.ProtocolTCP, external),
		clusterIPService(3, v1.ProtocolSCTP, nil),
		clusterIPService(6, v1.ProtocolTCP, func(s *v1.Service) {
			s.Spec.Type, s.Spec.LoadBalancerSourceRanges = v1.ServiceTypeLoadBalancer, []string{"198.51.100.0/24"}
			s.Spec.ClusterIPs, s.Spec.IPFamilies = append(s.Spec.ClusterIPs, "fd00:10:96::6"), append(s.Spec.IPFamilies, v1.IPv6Protocol)
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.21"}, {IP: "2001:db8:203:113::21"}}
		}),
	)

	// Another process has the ports.
	var others []net.Listener
	for _, address := range []string{"0.0.0.0:10256", "127.0.0.1:10249"} {
		other, err := n.Listen(address)
		if err != nil {
			t.Fatal(err)
		}
		others = append(others, other)
	}
	defer func() {
		for _, other := range others {
			other.Close()
		}
	}()
	p := startWith(t, n, api, "--config="+filepath.Join(volume, "config.conf"), "--ebpf-fallback=none", fmt.Sprintf("--ebpf-max-frontends=%d", tiny), "--ebpf-sync-period=500ms")
	defer func() {
		_ = p.Close()
		cleanup(t, n)
	}()
	// becomes waits for exactly these Events.
	becomes := func(what string, want ...string) {
		t.Helper()
		slices.Sort(want)
		p.await(t, what, func() error {
			if d := cmp.Diff(want, allEvents(api)); d != "" {
				return errors.New("Events (-want +got):\n" + d)
			}
			return nil
		})
	}
	const (
		metrics = "Warning FailedToStartMetricServer Node/node1 by kube-proxy, StartKubeProxy"
		health  = "Warning FailedToStartProxierHealthcheck Node/node1 by kube-proxy, StartKubeProxy"
	)
	told := []string{
		"Normal Starting Node/node1 by kube-proxy, StartKubeProxy",
		"Warning Conflict Service/s2 uid-of-s2 by kube-proxy, Sync",
		"Warning Unguarded Service/s6 uid-of-s6 by kube-proxy, Sync",
		"Warning Unsupported Service/s3 uid-of-s3 by kube-proxy, Sync",
	}
	// The ports are tried again after a while, which a slow machine takes for its first sync.
	p.await(t, "those of the start", func() error {
		var got []string
		for _, event := range allEvents(api) {
			got = append(got, strings.TrimSuffix(event, " again"))
		}
		want := append(slices.Clone(told), metrics, health)
		slices.Sort(want)
		if d := cmp.Diff(want, got); d != "" {
			return errors.New("Events (-want +got):\n" + d)
		}
		return nil
	})
	told = append(told, metrics+" again", health+" again")
	becomes("those of the second try", told...)
	for _, other := range others {
		other.Close()
	}
	p.await(t, "the ports", healthy(n))

	// Exceed the capacity, and write an invalid file.
	api.Put(clusterIPService(4, v1.ProtocolTCP, nil), clusterIPService(5, v1.ProtocolTCP, nil))
	told = append(told, "Warning Capacity Service/s5 uid-of-s5 by kube-proxy, Sync")
	becomes("that of the Service that does not fit", told...)
	if err := configmap.Update(volume, map[string]string{"config.conf": config + "bindAddress: nowhere\n"}); err != nil {
		t.Fatal(err)
	}
	told = append(told, "Warning InvalidConfig Node/node1 by kube-proxy, Sync")
	becomes("that of the file", told...)
	if note := eventsOf(api, "InvalidConfig"); !strings.Contains(note[0], volume+"/config.conf:7: bindAddress: Invalid value") {
		t.Errorf("the Event about the file says %q", note)
	}

	// Remove a program.
	detach(t, n, ciliumebpf.AttachCGroupInet4Connect)
	told = append(told, "Warning KernelStateRepaired Node/node1 by kube-proxy, Sync")
	becomes("that of the repair", told...)
	if note := eventsOf(api, "KernelStateRepaired"); !strings.Contains(note[0], "lacked tdm_connect4; attached again") {
		t.Errorf("the Event about the repair says %q", note)
	}

	// Periodic full syncs write no further Events.
	periodic := func() int { return strings.Count(p.Log.String(), `reason="periodic"`) }
	p.await(t, "further syncs", func() error {
		if periodic() < 3 {
			return errors.New("too few periodic syncs")
		}
		return nil
	})
	becomes("nothing else", told...)
}

// A process that runs in another mode than requested writes an Event about the Node.
func TestFallbackEvent(t *testing.T) {
	all := func(p *process) *process { return p }
	for name, c := range map[string]struct {
		lacks func(*process) *process
		flags []string
		file  string
		why   string
	}{
		"a feature":    {all, []string{"--ebpf-capability-mask=connect4=no", "--conntrack-max-per-core=0"}, "", "instead of ebpf: mode ebpf requires connect4"},
		"a capability": {func(p *process) *process { return p.without(unix.CAP_SYS_ADMIN) }, []string{"--conntrack-max-per-core=0"}, "", "needs CAP_SYS_ADMIN"},
		"mode nftables": {all, []string{"--proxy-mode="}, "mode: nftables\nconntrack: {maxPerCore: 0}\n",
			"instead of nftables: Tandem has no mode nftables of its own; mode iptables serves with the nft variant of iptables"},
	} {
		t.Run(name, func(t *testing.T) {
			l := lab.NewT(t)
			n := l.Node("node1")
			api := fakeapi.New(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}})
			flags := c.flags
			if c.file != "" {
				file := filepath.Join(t.TempDir(), "config.yaml")
				if err := os.WriteFile(file, []byte(configHead+c.file), 0o600); err != nil {
					t.Fatal(err)
				}
				flags = append(flags, "--config="+file)
			}
			p := begin(t, c.lacks(with(t, n, api, flags...)))
			defer func() {
				_ = p.Close()
				cleanup(t, n)
			}()
			p.await(t, "Events", func() error {
				want := []string{"Normal Starting Node/node1 by kube-proxy, StartKubeProxy", "Warning ProxyModeFallback Node/node1 by kube-proxy, StartKubeProxy"}
				if d := cmp.Diff(want, allEvents(api)); d != "" {
					return errors.New("Events (-want +got):\n" + d)
				}
				return nil
			})
			if note := eventsOf(api, "ProxyModeFallback"); !strings.Contains(note[0], "mode iptables runs instead of ") || !strings.Contains(note[0], c.why) {
				t.Errorf("the Event says %q", note)
			}
			p.await(t, "the mode", func() error {
				if _, body, err := n.Get(t.Context(), 10249, "/proxyMode"); err != nil || body != "iptables" {
					return fmt.Errorf("/proxyMode says %q: %w", body, err)
				}
				return nil
			})
			if c.file != "" {
				p.await(t, "the log", p.Says(`"Opened the iptables datapath" variant="nft"`))
			}
		})
	}
}
