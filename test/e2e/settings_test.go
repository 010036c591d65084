// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// setting reads a kernel setting of a node.
func setting(t testing.TB, n *lab.Node, name string) (value string) {
	t.Helper()
	if err := n.Do(func() error {
		b, err := os.ReadFile("/proc/sys/net/" + name)
		value = strings.Join(strings.Fields(string(b)), " ")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return value
}

// readOnly makes /proc/sys read-only for a command, as in an unprivileged container.
func (p *process) readOnly() *process {
	p.Path, p.Args = "/bin/sh", append([]string{
		"sh", "-c", `exec unshare --mount sh -c 'mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && exec "$0" "$@"' "$0" "$@"`,
	}, p.Args...)
	return p
}

// settings are flags that change the kernel settings of a node.
var settings = []string{"--conntrack-tcp-timeout-established=1234s", "--conntrack-tcp-timeout-close-wait=56s", "--conntrack-udp-timeout=7s", "--conntrack-udp-timeout-stream=89s", "--conntrack-tcp-be-liberal"}

func checkConntrack(t *testing.T, n *lab.Node) {
	t.Helper()
	for name, want := range map[string]string{"tcp_timeout_established": "1234", "tcp_timeout_close_wait": "56", "udp_timeout": "7", "udp_timeout_stream": "89", "tcp_be_liberal": "1"} {
		if got := setting(t, n, "netfilter/nf_conntrack_"+name); got != want {
			t.Errorf("nf_conntrack_%s is %s, want %s", name, got, want)
		}
	}
}

// TestInitOnly: a privileged process with --init-only changes only kernel settings. Then
// a process runs that cannot change them.
func TestInitOnly(t *testing.T) {
	for _, test := range []struct {
		mode string
		set  map[string]string
	}{
		{"iptables", map[string]string{"ipv4/conf/all/route_localnet": "1"}},
		{"ebpf", map[string]string{"ipv4/ip_local_reserved_ports": "30000-32767", "ipv4/conf/all/route_localnet": "0"}},
		{"ipvs", map[string]string{"ipv4/vs/conntrack": "1", "ipv4/ip_forward": "1", "ipv4/conf/all/arp_ignore": "1", "ipv4/conf/all/route_localnet": "1"}},
	} {
		t.Run(test.mode, func(t *testing.T) {
			needs(t, []string{"--proxy-mode=" + test.mode})
			s := newStage(t)
			if test.mode == "ipvs" {
				upstream.NeedsIPVS(t, s.node)
			}
			if err := s.node.Do(func() error {
				return os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("20000 60000"), 0)
			}); err != nil {
				t.Fatal(err)
			}
			flags := append([]string{"--proxy-mode=" + test.mode, "--manifests=" + s.dir, "--hostname-override=node1", "--ipvs-strict-arp"}, settings...)
			first := command(s.node, append(flags, "--init-only")...)
			if err := first.Run(); err != nil {
				t.Fatalf("--init-only: %v\n%s", err, first.Log)
			}
			checkConntrack(t, s.node)
			for name, want := range test.set {
				if got := setting(t, s.node, name); got != want {
					t.Errorf("%s is %s, want %s", name, got, want)
				}
			}
			if left := rules(t, s.node); strings.Contains(left, "KUBE-") {
				t.Errorf("--init-only left rules:\n%s", left)
			}
			if on := devicesWithPrograms(t, s.node); len(on) > 0 {
				t.Errorf("--init-only left programs on %v", on)
			}

			second := begin(t, command(s.node, append(flags, "-v=2")...).readOnly())
			defer cleanup(t, s.node)
			defer second.Close()
			second.synced(t)
			if strings.Contains(second.Log.String(), "read-only file system") {
				t.Error("a setting had to be changed")
			}
		})
	}
}

// If conntrack settings cannot be changed, modes that upstream has exit, and mode ebpf
// logs it.
func TestConntrackCannotBeSet(t *testing.T) {
	s := newStage(t)
	flags := append([]string{"--manifests=" + s.dir, "--hostname-override=node1"}, settings...)

	first := command(s.node, append(flags, "--proxy-mode=iptables")...).readOnly()
	if err := first.Run(); err == nil || first.Says("set up conntrack: change sysctl")() != nil {
		t.Errorf("error %v\n%s", err, first.Log)
	}

	second := begin(t, command(s.node, append(flags, "--proxy-mode=ebpf", "-v=2")...).readOnly())
	defer cleanup(t, s.node)
	defer second.Close()
	second.synced(t)
	if err := second.Says("conntrack settings differ from the configuration")(); err != nil {
		t.Error(err)
	}
}

// TestOOMScore: a score that cannot be set is only logged.
func TestOOMScore(t *testing.T) {
	s := newStage(t)
	s.start("--oom-score-adj=123")
	defer s.end()
	if got, err := os.ReadFile("/proc/" + strconv.Itoa(s.Process.Pid) + "/oom_score_adj"); err != nil || string(bytes.TrimSpace(got)) != "123" {
		t.Errorf("the score is %s, error %v", got, err)
	}
	s.Terminate(t)

	p := command(s.node, "--proxy-mode=ebpf", "--manifests="+s.dir, "--hostname-override=node1", "-v=2")
	p.Path, p.Args = "/bin/sh", append([]string{"sh", "-c", `exec unshare --mount sh -c 'mount --bind /proc/version /proc/$$/oom_score_adj && mount -o remount,bind,ro /proc/$$/oom_score_adj && exec "$0" "$@"' "$0" "$@"`}, p.Args...)
	s.process = begin(t, p)
	p.synced(t)
	if err := p.Says("Cannot set the OOM score; continuing without it")(); err != nil {
		t.Error(err)
	}
}

// TestValidateOnly: it prints what is wrong, and changes nothing.
func TestValidateOnly(t *testing.T) {
	n := lab.NewT(t).Node("node1")
	file := t.TempDir() + "/config.yaml"
	for _, test := range []struct {
		text, want string
		fails      bool
	}{
		{text: "mode: ebpf\nwarp: 9\n", want: "warning: " + file + ":4: KubeProxyConfiguration: unknown field \"warp\" (ignored)\nThe configuration is valid: mode ebpf\n"},
		{text: "mode: nftables\noomScoreAdj: low\nbindAddress: here\n", fails: true, want: "error: " + file + ":4: KubeProxyConfiguration.oomScoreAdj: got string, want a whole number\nerror: " + file + ":5: bindAddress: "},
	} {
		if err := os.WriteFile(file, []byte("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"+test.text), 0o600); err != nil {
			t.Fatal(err)
		}
		p := command(n, "--config="+file, "--validate-only", "--cleanup", "--init-only")
		if err := p.Run(); (err != nil) != test.fails || !strings.Contains(p.Log.String(), test.want) {
			t.Errorf("error %v, said\n%s\nwant\n%s", err, p.Log, test.want)
		}
	}
	if n := setting(t, n, "ipv4/conf/all/route_localnet"); n != "0" {
		t.Error("a kernel setting was changed")
	}
}
