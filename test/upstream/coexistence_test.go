// SPDX-License-Identifier: Apache-2.0

//go:build linux

package upstream

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/component-base/cli"

	"github.com/tandem-proxy/tandem/cmd/kube-proxy/app"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/scenarios"
	"github.com/tandem-proxy/tandem/test/scenarios/live"
)

// asProxy makes a copy of the test program run as this project's kube-proxy.
const asProxy = "TANDEM_TEST_AS_KUBE_PROXY"

func TestMain(m *testing.M) {
	if os.Getenv(asProxy) != "" {
		os.Exit(cli.Run(app.NewCommand()))
	}
	lab.Main()
	os.Exit(m.Run())
}

// pair is upstream's kube-proxy and this project's beside it, as a scenario starts them.
type pair struct {
	Program
	preset string
}

// Serves leaves out what programs at sockets cannot do, where they are this proxy's share.
func (p pair) Serves(e *proxier.Explanation) error {
	if p.preset == config.CoexistSocketLB {
		return live.SocketsCannot(e)
	}
	return nil
}

func (p pair) Start(ctx context.Context, node *lab.Node, c *scenarios.Config, objects []metav1.Object) (live.Proxy, error) {
	theirs, err := p.Program.Start(ctx, node, c, objects)
	if err != nil {
		return theirs, err
	}
	r := &runningPair{running: theirs.(*running), preset: p.preset, args: argsOf(c, p.Mode)}
	if c.StrictSourceRanges {
		r.args = append(r.args, "--strict-source-ranges")
	}
	if r.pods != NoPods {
		r.args = append(r.args, "--cluster-cidr="+r.pods)
	}
	return r, r.startOurs(ctx)
}

// runningPair is a live.Proxy.
type runningPair struct {
	*running
	preset string
	args   []string
	ours   *lab.Watched
	beside *Proxy // that ours was started with
}

func (r *runningPair) startOurs(ctx context.Context) error {
	r.beside = r.proxy
	r.ours = lab.Watch(r.node.Command(context.Background(), os.Args[0], append([]string{
		"--proxy-mode=ebpf", "--coexist=" + r.preset, "--master=" + r.proxy.URL, "--hostname-override=" + r.node.Name,
		"--oom-score-adj=0", "--ebpf-cgroup-root=" + r.node.CgroupPath(),
	}, r.args...)...))
	r.ours.Env = append(os.Environ(), asProxy+"=1")
	if err := r.ours.Start(); err != nil {
		return err
	}
	if err := r.awaitMark(ctx, 4*syncTimeout); err != nil {
		return err
	}
	return r.awaitServes(ctx)
}

// awaitServes waits until this project's proxy serves its share. Until then the other one serves all, and no call would show it.
func (r *runningPair) awaitServes(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	err := wait.PollUntilContextCancel(ctx, 10*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		_, text, err := r.node.Get(ctx, config.SharedHealthzPort, "/readyz")
		return err == nil && strings.Contains(text, `{"name":"programmed","ok":true}`), nil
	})
	if err != nil {
		return fmt.Errorf("wait for a sync without errors of the proxy beside it: %w; its log:\n%s", err, r.ours.Log)
	}
	return nil
}

func (r *runningPair) End() {
	_ = r.ours.Close()
	r.running.End()
}

func (r *runningPair) Apply(ctx context.Context, changes []scenarios.ObjectChange) error {
	if err := r.running.Apply(ctx, changes); err != nil {
		return err
	}
	return r.awaitOurs(ctx)
}

func (r *runningPair) Learn(ctx context.Context) error {
	return errors.Join(r.running.Learn(ctx), r.awaitOurs(ctx))
}

// awaitOurs waits until this project's proxy has programmed a mark. It decides about a second mark
// only after it has programmed the first one.
func (r *runningPair) awaitOurs(ctx context.Context) error {
	if r.beside != r.proxy { // upstream's was started again, with another API server
		_ = r.ours.Close()
		return r.startOurs(ctx)
	}
	return r.awaitMark(ctx, syncTimeout)
}

func (r *runningPair) awaitMark(ctx context.Context, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for range 2 {
		r.turn++
		r.mark()
		query := fmt.Sprintf("/debug/explain?src=127.0.0.1&dst=10.96.254.254:%d&protocol=tcp", r.turn)
		err := wait.PollUntilContextCancel(ctx, 10*time.Millisecond, true, func(ctx context.Context) (bool, error) {
			if r.ours.Ended() {
				return false, errors.New("it has ended")
			}
			text, err := r.node.Fetch(ctx, config.SharedMetricsPort, query)
			return err == nil && strings.Contains(text, fmt.Sprintf(`"address":"192.0.2.1:%d"`, r.turn)), nil
		})
		if err != nil {
			return fmt.Errorf("wait for the proxy beside it: %w; its log:\n%s", err, r.ours.Log)
		}
	}
	return nil
}

// oftenPlayed are played for each pair in short mode: all of them take four times as long as TestCompatibility.
var oftenPlayed = []string{"s05-external-ip", "s40-external-local", "s42-policy-switched", "s50-cluster-ip-from-outside", "s60-affinity", "s71-udp-moves", "s88-restart"}

// TestCoexistence plays the scenarios with upstream's kube-proxy and this project's beside it. The
// result is that of the scenario, except for calls to which upstream alone gives the same other
// answer.
func TestCoexistence(t *testing.T) {
	binary := BinaryT(t)
	kernel.NeedsPrograms(t)
	list, err := scenarios.WithoutPods()
	if err != nil {
		t.Fatal(err)
	}
	type play struct {
		*scenarios.Scenario
		pair
	}
	if testing.Short() {
		list = slices.DeleteFunc(list, func(s *scenarios.Scenario) bool { return !slices.Contains(oftenPlayed, s.Name) })
	}
	modes := []string{"iptables", "nftables"}
	t.Run("ipvs", func(t *testing.T) {
		NeedsIPVS(t, lab.NewT(t).Node("node1"))
		modes = append(modes, "ipvs")
	})
	next := make(chan play)
	var wg sync.WaitGroup
	for range Players() {
		wg.Go(func() {
			for p := range next {
				t.Run(p.Mode+"/"+p.preset+"/"+p.Name, func(t *testing.T) { playShared(t, p.Scenario, p.pair) })
			}
		})
	}
	number := 0
	for _, mode := range modes {
		for _, preset := range []string{config.CoexistSocketLB, config.CoexistNorthSouth} {
			for _, s := range list {
				if kernel.Dealt(number) && !cutsOff(mode, s) {
					next <- play{s, pair{Program{Binary: binary, Mode: mode}, preset}}
				}
				number++
			}
		}
	}
	close(next)
	wg.Wait()
}

// cutsOff reports whether upstream refuses connections to 127.0.0.1, by which this proxy is asked: it takes the ClusterIP of a
// Service, which no API server accepts, and mode nftables rejects all other ports of ClusterIPs.
func cutsOff(mode string, s *scenarios.Scenario) bool {
	return mode == "nftables" && s.Name == "s05-invalid-addresses"
}

func playShared(t *testing.T, s *scenarios.Scenario, p pair) {
	together := &recorder{TB: t}
	live.PlayProgram(together, s, p)
	if len(together.errors) == 0 {
		return
	}
	alone := &recorder{TB: t}
	live.PlayProgram(alone, s, p.Program)
	known := map[string]bool{}
	for _, text := range alone.errors {
		// After a change that was not synced nothing is played.
		if failedSync.MatchString(text) && !isNeverSynced(s) {
			t.Error(text)
			continue
		}
		known[answerOf(text)] = true
	}
	for _, text := range together.errors {
		if answer := answerOf(text); answer == "" || !known[answer] && !differsByChance(s, text) && !neitherAlone(text, p.preset) {
			t.Errorf("%s; with upstream's alone: %q", text, alone.errors)
		}
	}
}

// neitherAlone reports whether a call gets an answer that none of the two proxies gives alone, with the reason here.
func neitherAlone(text, preset string) bool {
	// This one's part makes the socket forget the endpoint of a deleted Service, as it does alone. It leaves ClusterIPs that no Service
	// has to the other one, whose rules let packets to them go where routes lead; alone, that one's conntrack entry still leads to the
	// endpoint.
	return preset == config.CoexistSocketLB && answerOf(text) == "20: timed out" && strings.HasPrefix(text, "s71-udp-no-endpoints.txtar:")
}

// answerOf is the line of a call that failed, with what was observed, or that of a change that was not synced.
func answerOf(text string) string {
	if said := failedCall.FindStringSubmatch(text); said != nil {
		return said[2] + ": " + count.ReplaceAllString(said[3], "")
	}
	if said := failedSync.FindStringSubmatch(text); said != nil {
		return said[2]
	}
	return ""
}

// isNeverSynced reports whether it is known that upstream does not program a change of a scenario.
func isNeverSynced(s *scenarios.Scenario) bool {
	for _, r := range reasons {
		if r.call == "nothing is programmed" && regexp.MustCompile("^("+r.scenario+")$").MatchString(s.Name) {
			return true
		}
	}
	return false
}

// differsByChance reports whether upstream answers a call otherwise now and then.
func differsByChance(s *scenarios.Scenario, text string) bool {
	d, err := differenceOf(s, text)
	if err != nil {
		return false
	}
	_, always := d.row()
	return !always
}
