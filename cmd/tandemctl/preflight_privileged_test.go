// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/kernel/attached"
	"github.com/tandem-proxy/tandem/kernel/sysctl"
	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/observe/preflight"
	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// runPreflight runs the real tool on a node, through another program if there is one, and returns its
// report and its exit code.
func runPreflight(t *testing.T, at *lab.Node, through []string, args ...string) (r *preflightReport, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	c := program(t, "tandemctl", at.Sandbox, append([]string{"preflight", "-o", "json", "--node=" + at.Name, "--cgroup-root=" + at.CgroupPath()}, args...)...)
	if len(through) > 0 {
		c.Path, c.Args = through[0], append(slices.Clone(through), append([]string{os.Args[0]}, c.Args[1:]...)...)
	}
	c.Stdout, c.Stderr = &out, &errs
	_ = c.Run()
	r = &preflightReport{}
	if err := json.Unmarshal(out.Bytes(), r); err != nil {
		t.Fatalf("%v\n%s%s", err, &out, &errs)
	}
	return r, c.ProcessState.ExitCode()
}

func findingOf(r *preflightReport, subject, what string) *preflight.Finding {
	i := slices.IndexFunc(r.Findings, func(f preflight.Finding) bool { return f.Subject == subject && strings.Contains(f.What, what) })
	if i < 0 {
		return nil
	}
	return &r.Findings[i]
}

// state is what a tool could have changed on a node, programs included.
func state(t *testing.T, at *lab.Node) string {
	t.Helper()
	all, err := at.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var programs, more []attached.Program
	err = at.Do(func() error {
		links, err := at.Netlink().LinkList()
		if err == nil {
			programs, err = attached.Devices(links)
		}
		return err
	})
	if err == nil {
		more, err = attached.Cgroups(at.CgroupPath())
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range append(programs, more...) {
		all += fmt.Sprintf("program %+v\n", p)
	}
	return all
}

// TestPreflight finds what is on a node beside upstream's kube-proxy, and changes nothing.
func TestPreflight(t *testing.T) {
	kernel.NeedsPrograms(t)
	binary := upstream.BinaryT(t)
	n := lab.NewT(t).Node("node1")
	ctx, cancel := context.WithTimeout(t.Context(), testPatience)
	defer cancel()
	p, err := upstream.Start(ctx, n, upstream.Options{Binary: binary, Mode: "nftables", Objects: []fakeapi.Object{shadowed("web", 10, v1.ServiceExternalTrafficPolicyCluster, v1.ServiceAffinityNone)}, Args: upstream.Flags})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	// Only the first network namespace can change the limit of conntrack.
	flags := append([]string{"--", "--master=" + p.URL, "--cluster-cidr=10.244.0.0/16,fd00:10:244::/48"}, upstream.Flags...)

	const setting = "net.netfilter.nf_conntrack_tcp_timeout_close_wait"
	if out, err := n.Command(ctx, "sh", "-c", "echo 60 > /proc/sys/"+strings.ReplaceAll(setting, ".", "/")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	before := state(t, n)
	r, code := runPreflight(t, n, nil, flags...)
	if after := state(t, n); after != before {
		t.Errorf("it changed the node:\n%s", cmp.Diff(before, after))
	}
	if r.Verdict != "go" || code != exitGo || r.Mode != "ebpf" || len(r.Services) != 12 || len(r.Unseen) != 0 || len(r.Uplinks) != 1 {
		t.Errorf("exit code %d, %+v", code, r)
	}
	if f := findingOf(r, "kube-proxy", "another kube-proxy runs in mode nftables"); f == nil || len(r.Findings) != 1 {
		t.Errorf("findings %+v", r.Findings)
	}
	if !slices.Contains(r.Settings, sysctl.Change{Setting: setting, From: "60", To: "3600"}) {
		t.Errorf("settings %+v", r.Settings)
	}

	// From manifests it says the same of them.
	dir := t.TempDir()
	web := shadowed("web", 10, v1.ServiceExternalTrafficPolicyCluster, v1.ServiceAffinityNone)
	web.APIVersion, web.Kind = "v1", "Service"
	object, err := json.Marshal(web)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "web.json"), object, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	offline, code := runPreflight(t, n, nil, append([]string{"--manifests=" + dir}, append([]string{"--"}, flags[2:]...)...)...)
	if !reflect.DeepEqual(offline.Services, r.Services) || code != exitGo {
		t.Errorf("from manifests: exit code %d, services %+v, want %+v", code, offline.Services, r.Services)
	}

	// One of the two service ports does not fit into the maps.
	r, _ = runPreflight(t, n, nil, append(slices.Clone(flags), "--ebpf-max-frontends=8")...)
	over := slices.DeleteFunc(slices.Clone(r.Services), func(p explain.Placement) bool { return p.Carrier != "iptables" || p.Reason != "frontends full" })
	if len(over) != len(r.Services)/2 {
		t.Errorf("over capacity: %+v of %+v", over, r.Services)
	}

	// Everything that a lab can have.
	setup := n.Command(ctx, "sh", "-ec", `
		for d in flannel.1 nodelocaldns; do ip link add $d type bridge; ip link set $d up; done
		ip address add 10.96.0.10/32 dev nodelocaldns
		iptables-nft -P FORWARD DROP
		iptables-nft -t raw -A PREROUTING -p tcp --dport 30100 -j DROP
		nft 'add table inet guard; add chain inet guard early { type filter hook prerouting priority -200; }; add rule inet guard early tcp dport 30101 drop'
		nft 'add table inet firewalld; add chain inet firewalld filter_FORWARD { type filter hook forward priority 10; policy drop; }; add rule inet firewalld filter_FORWARD ct status dnat accept'`)
	if out, err := setup.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	wants := [][2]string{
		{"cni", "flannel (device flannel.1)"}, {"node-local-dns", "the ClusterIP of Service shop/web"}, {"firewall", "chain FORWARD in table ip filter of nf_tables"},
		{"firewall", "firewalld: chain filter_FORWARD"}, {"policy", "in table ip raw of nf_tables filters IPv4 TCP ports 30100 before DNAT"},
		{"policy", "in table inet guard of nf_tables filters TCP ports 30101 before DNAT"}, {"programs", "on cgroups: someone"},
	}
	for finding, command := range map[string]string{
		"IPsec: 1 policies": "ip xfrm policy add src 10.0.0.0/8 dst 10.0.0.0/8 dir out tmpl src 172.18.0.1 dst 172.18.0.9 proto esp mode tunnel",
		"WireGuard: wg0":    "ip link add wg0 type wireguard",
	} {
		out, err := n.Command(ctx, "sh", "-c", command).CombinedOutput()
		if err == nil {
			wants = append(wants, [2]string{"encryption", finding})
		} else if text := string(out); strings.Contains(text, "not supported") || strings.Contains(text, "Unknown device type") {
			if os.Getenv(lab.RequireModulesEnv) == "1" {
				t.Errorf("missing: what %q needs: %s", finding, text)
			}
			t.Logf("missing: what %q needs: %s", finding, text)
		} else {
			t.Fatalf("%s: %v: %s", command, err, text)
		}
	}
	for _, hook := range attach(t, n) {
		wants = append(wants, [2]string{"programs", ", " + hook + " " + lab.Uplink + ")"})
	}
	before = state(t, n)
	r, code = runPreflight(t, n, nil, flags...)
	if after := state(t, n); after != before {
		t.Errorf("it changed the node:\n%s", cmp.Diff(before, after))
	}
	if code != exitRemarks {
		t.Errorf("exit code %d", code)
	}
	for _, want := range wants {
		if findingOf(r, want[0], want[1]) == nil {
			t.Errorf("no finding %q in %+v", want, r.Findings)
		}
	}
	var text strings.Builder
	if err := writePreflight(&text, r, false); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", &text)

	// Mode iptables runs where programs cannot, and without privileges it says what it could not see.
	if r, code = runPreflight(t, n, nil, append([]string{"--proxy-mode=iptables"}, flags...)...); r.Mode != "iptables" || code != exitGo {
		t.Errorf("exit code %d, %+v", code, r)
	}
	t.Run("without privileges", func(t *testing.T) {
		const setpriv, bounding, inheritable = "setpriv", "--bounding-set=-all", "--inh-caps=-all"
		path, err := exec.LookPath(setpriv)
		if err == nil {
			err = exec.Command(path, bounding, inheritable, "true").Run() // not that of busybox
		}
		if err != nil {
			lab.SkipOrFailProgram(t, fmt.Errorf("%s (Debian package util-linux): %w", setpriv, err))
		}
		if r, code := runPreflight(t, n, []string{path, bounding, inheritable}, flags...); code == exitGo || len(r.Unseen) < 3 {
			t.Errorf("exit code %d, %+v", code, r.Unseen)
		}
	})
	// No mode at all.
	if r, code = runPreflight(t, n, nil, append(slices.Clone(flags), "--ebpf-capability-mask=connect4=no", "--ebpf-fallback=none")...); code != exitNo || r.Mode != "" || findingOf(r, "mode", "connect4") == nil {
		t.Errorf("exit code %d, %+v", code, r.Findings)
	}
}

// attach attaches programs of someone else, which do nothing, to a node's cgroup and, where the kernel has
// such links, to its uplink. It returns the hooks there.
func attach(t *testing.T, at *lab.Node) (hooks []string) {
	t.Helper()
	load := func(kind ciliumebpf.ProgramType, to ciliumebpf.AttachType, result int32) *ciliumebpf.Program {
		p, err := ciliumebpf.NewProgram(&ciliumebpf.ProgramSpec{
			Name: "someone", Type: kind, AttachType: to, License: "GPL",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, result), asm.Return()},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Close() })
		return p
	}
	cgroup, err := link.AttachCgroup(link.CgroupOptions{
		Path: at.CgroupPath(), Attach: ciliumebpf.AttachCGroupInet4Connect, Program: load(ciliumebpf.CGroupSockAddr, ciliumebpf.AttachCGroupInet4Connect, 1),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cgroup.Close() })
	uplink, err := at.Netlink().LinkByName(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	for hook, attach := range map[string]func() (link.Link, error){
		"tcx ingress": func() (link.Link, error) {
			p := load(ciliumebpf.SchedCLS, ciliumebpf.AttachTCXIngress, -1)
			return link.AttachTCX(link.TCXOptions{Interface: uplink.Attrs().Index, Attach: ciliumebpf.AttachTCXIngress, Program: p})
		},
		"xdp": func() (link.Link, error) {
			return link.AttachXDP(link.XDPOptions{Interface: uplink.Attrs().Index, Program: load(ciliumebpf.XDP, ciliumebpf.AttachXDP, 2)}) // XDP_PASS
		},
	} {
		err := at.Do(func() error {
			l, err := attach()
			if err == nil {
				t.Cleanup(func() { _ = l.Close() })
				hooks = append(hooks, hook)
			}
			return err
		})
		if err != nil && !errors.Is(err, link.ErrNotSupported) {
			t.Fatalf("%s: %v", hook, err)
		}
	}
	return hooks
}

// TestShadowWithoutEvents says how to turn notifications on, and does not.
func TestShadowWithoutEvents(t *testing.T) {
	n := lab.NewT(t, lab.Options{Nodes: lab.NodeSettings{Conntrack: true}}).Node("node1")
	const setting = "/proc/sys/net/netfilter/nf_conntrack_events"
	if out, err := n.Command(t.Context(), "sh", "-c", "echo 0 > "+setting).CombinedOutput(); err != nil {
		lab.SkipOrFail(t, fmt.Errorf("conntrack events: %w: %s", err, out))
	}
	var errs bytes.Buffer
	c := program(t, "tandemctl", n.Sandbox, "shadow", "--for=1s", "--manifests="+t.TempDir(), "--node=node1")
	c.Stderr = &errs
	if _ = c.Run(); c.ProcessState.ExitCode() != exitNo || !strings.Contains(errs.String(), "sysctl -w net.netfilter.nf_conntrack_events=1") {
		t.Errorf("exit code %d: %s", c.ProcessState.ExitCode(), &errs)
	}
	if out, err := n.Command(t.Context(), "cat", setting).Output(); err != nil || strings.TrimSpace(string(out)) != "0" {
		t.Errorf("%s is %s, %v", setting, out, err)
	}
}
