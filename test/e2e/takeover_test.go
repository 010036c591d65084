// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"cmp"
	"flag"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/upstream"
)

// TestTakeOver: upstream's kube-proxy is replaced by this one, and that by upstream's again, by the
// image alone. Of many connections with traffic none breaks, and all the time new ones succeed. Only upstream's mode
// nftables begins with a time without rules: before its first sync it removes those of other modes, whoever wrote them.
func TestTakeOver(t *testing.T) {
	binary := upstream.BinaryT(t)
	each := cmp.Or(*takeOverEach, kernel.Rounds(10000)/int(lab.Slower()*lab.Slower()))
	i := 0
	for _, theirs := range []string{"iptables", "nftables", "ipvs"} {
		for _, ours := range []string{"ebpf", "iptables", "ipvs"} {
			if i++; kernel.Dealt(i) {
				t.Run(theirs+"/"+ours, func(t *testing.T) {
					takeOver(t, upstream.Options{Binary: binary, Mode: theirs}, ours, each)
				})
			}
		}
	}
}

var (
	takeOverFlows = flag.Int("takeover", 100000, "TCP connections, and UDP flows, of BenchmarkTakeOver")
	takeOverEach  = flag.Int("takeover-each", 0, "those of each pair of modes in TestTakeOver; 0 for 10,000, and fewer in short mode and on an emulated machine")
)

// BenchmarkTakeOver is TestTakeOver with ten times the connections.
func BenchmarkTakeOver(b *testing.B) {
	binary := upstream.BinaryT(b)
	for b.Loop() {
		takeOver(b, upstream.Options{Binary: binary, Mode: "iptables"}, "ebpf", *takeOverFlows)
	}
}

func takeOver(t testing.TB, o upstream.Options, ours string, each int) {
	ipvs := o.Mode == "ipvs" || ours == "ipvs"
	s := newStage(t, lab.Options{Pause: true, PortsInTurn: ipvs})
	_, many := t.(*testing.B)
	if many {
		s.keepsUDP() // until all are open
	}
	if ipvs {
		upstream.NeedsIPVS(t, s.node)
	}
	needs(t, []string{"--proxy-mode=" + ours})
	defer s.end()
	var pods []*lab.Pod
	for i := range max(2, each/5000) {
		n := s.node
		if i%2 == 1 {
			n = s.there.Node
		}
		pods = append(pods, n.Pod(fmt.Sprintf("server%d", i)))
		if _, err := pods[i].SpawnServer(targetPort); err != nil {
			t.Fatal(err)
		}
	}
	o.Objects, o.Args = objects(t, loadBalancer, pods...), upstream.Flags
	theirs, err := upstream.Start(t.Context(), s.node, o)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = theirs.Close() }()
	await(t, "upstream's first sync", func() error { return s.reaches("server0", 3) })
	begun := time.Now()
	c := newCrowd(t, s, each)
	defer c.end(t)
	t.Logf("%d TCP connections and as many UDP flows open, and asked again, after %s", each, time.Since(begun).Round(time.Second))

	w, pace := lab.NewLoad(t), strictly
	if ipvs {
		pace = slowly
	}
	defer w.End()
	if !many { // two CPUs do not get to them in time
		s.everybody(func(from *lab.Sandbox, ways map[string]netip.AddrPort) { w.Use(from, ways, pace) })
		w.More(100)
	}
	begun = time.Now()
	_ = theirs.Close()
	writeManifests(t, s.dir, loadBalancer, append(pods, s.here)...)
	s.start("--proxy-mode="+ours, "--ebpf-yield-grace-period="+(3*lab.RequestTimeout()).String())
	await(t, "new connections of all clients to a new endpoint", func() error { return s.reaches("here", 3) })
	c.more(t)
	t.Logf("taken over after %s", time.Since(begun).Round(time.Second))

	newOnes := func() {
		if many {
			return
		}
		w.More(100)
		w.End()
		few(t, w)
	}
	interrupts := o.Mode == "nftables" && ours != "ebpf"
	if interrupts {
		newOnes()
	}
	s.Terminate(t)
	s.process = nil
	if theirs, err = upstream.Start(t.Context(), s.node, o); err != nil {
		t.Fatal(err)
	}
	await(t, "no new connection to an endpoint that only this proxy knew", func() error { return s.reaches("here", 0) })
	c.more(t)
	if !interrupts {
		newOnes()
	}
	t.Logf("there and back after %s", time.Since(begun).Round(time.Second))
}

// Without a fallback, no rule of upstream's stays when programs serve, and its connections go on.
func TestTakeOverWithoutFallback(t *testing.T) {
	s := newStage(t, lab.Options{Pause: true})
	defer s.end()
	pod := s.node.Pod("server0")
	if _, err := pod.SpawnServer(targetPort); err != nil {
		t.Fatal(err)
	}
	theirs, err := upstream.Start(t.Context(), s.node, upstream.Options{Binary: upstream.BinaryT(t), Mode: "iptables", Objects: objects(t, loadBalancer, pod), Args: upstream.Flags})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = theirs.Close() }()
	await(t, "upstream's first sync", func() error { return s.reaches("server0", 3) })
	c := newCrowd(t, s, 20)
	defer c.end(t)
	_ = theirs.Close()
	const chain = "KUBE-SERVICES"
	if there, err := s.rules(); err != nil || !strings.Contains(there, chain) {
		t.Fatalf("upstream left no %s: %v", chain, err)
	}
	writeManifests(t, s.dir, loadBalancer, pod)
	s.start("--proxy-mode=ebpf", "--ebpf-fallback=none")
	await(t, "no rules", func() error {
		there, err := s.rules()
		if err == nil && strings.Contains(there, chain) {
			err = fmt.Errorf("%s is there:\n%s", chain, there)
		}
		return err
	})
	if err := s.reaches("server0", 3); err != nil {
		t.Error(err)
	}
	c.more(t)
}

func (s *stage) rules() (string, error) {
	var all strings.Builder
	for _, tool := range []string{"iptables-save", "ip6tables-save"} {
		out, err := s.node.Command(s.t.Context(), tool).Output()
		if err != nil {
			return "", fmt.Errorf("%s: %w", tool, err)
		}
		all.Write(out)
	}
	return all.String(), nil
}

// reaches fails unless a server answers some new connections of so many clients.
func (s *stage) reaches(server string, clients int) (err error) {
	reaching := map[*lab.Sandbox]bool{}
	s.everybody(func(from *lab.Sandbox, ways map[string]netip.AddrPort) {
		for range 10 {
			for name, to := range ways {
				if err != nil {
					return
				}
				r, failed := from.Ask(s.t.Context(), name[:3], to)
				if failed != nil {
					err = fmt.Errorf("%s from %s: %w", name, from.Name, failed)
				}
				if r.Server == server {
					reaching[from] = true
				}
			}
		}
	})
	if err == nil && len(reaching) != clients {
		err = fmt.Errorf("%d clients reach %s, want %d", len(reaching), server, clients)
	}
	return err
}
