// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/podns"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// optedOut are these pods, as objects of the API say.
func optedOut(pods ...*lab.Pod) (o proxier.OptOuts) {
	o.Complete = true
	for _, p := range pods {
		o.Pods = append(o.Pods, proxier.OptedOutPod{
			Object: types.NamespacedName{Namespace: "shop", Name: p.Name}, UID: types.UID(p.UID), CgroupUID: p.UID, Running: true,
			Field: "metadata.annotations[" + proxier.KeySocketLB + "]",
		})
	}
	return o
}

// setOptOuts has pods opt out, and looks at once.
func (n *node) setOptOuts(t testing.TB, o proxier.OptOuts) {
	t.Helper()
	n.tier.SetOptOuts(o)
	if err := n.tier.syncOptOuts(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// expectOptOuts compares the map with pods, and what opted them out.
func (n *node) expectOptOuts(t testing.TB, what string, want map[*lab.Pod]lbmap.OptOutBy) {
	t.Helper()
	got, err := lbmap.OptOuts(n.tier.maps["tdm_optout"])
	if err != nil {
		t.Fatal(err)
	}
	for pod, by := range want {
		if cookie := cookieOf(t, pod.Sandbox); got[cookie] != by {
			t.Errorf("%s: pod %s is opted out by %d, want %d", what, pod.Name, got[cookie], by)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%s: %d network namespaces are opted out, want %d", what, len(got), len(want))
	}
}

// TestOptOutsOfPods: pods opt out at once and back, without losing a connection. Their opt-outs survive the
// process, and those that no Pod asks for go once all Pods are known. Opt-outs by command stay.
func TestOptOutsOfPods(t *testing.T) {
	l := lab.NewT(t, lab.Options{Pause: true})
	one := l.Node("node1")
	web, client, other := serve(t, one.Pod("web")), one.Pod("client"), one.Pod("other")
	n := newPodNode(t, one, l)
	n.OnServiceAdd(dualService())
	n.setPods(web)
	const byPod, byCommand = lbmap.OptOutByPod, lbmap.OptOutByCommand
	type list = map[*lab.Pod]lbmap.OptOutBy

	n.setOptOuts(t, optedOut(other))
	n.expectOptOuts(t, "before the first sync", nil)
	n.sync(t)
	n.setOptOuts(t, optedOut(other))
	n.expectOptOuts(t, "after the first sync", list{other: byPod})
	n.setOptOuts(t, optedOut())
	to := targets()["tcp4"]
	// From a port that the kernel does not choose: a connection after the opt-out that had it would break this one
	// (docs/limits.md).
	atSocket, err := client.DialFrom(t.Context(), "tcp", 1025, to)
	if err != nil {
		t.Fatal(err)
	}
	defer atSocket.Close()
	ask := func(what string, want bool) {
		t.Helper()
		counts := counted{tier: n.tier}
		counts.since(t)
		for network, to := range targets() {
			if _, err := client.Ask(t.Context(), network[:3], to); err != nil {
				t.Errorf("%s: %s: %v", what, network, err)
			}
		}
		if translated := counts.since(t)["forwarded_local"] > 0; translated != want {
			t.Errorf("%s: packets of the pod are translated: %v, want %v", what, translated, want)
		}
	}
	ask("before", false)

	// No connection fails meanwhile: programs serve the device before sockets are not translated any more.
	pace := lab.Pace{Tries: 1}
	if !kernel.Has(capabilities.TCX) {
		pace.Tries = 2 // a reply that meets the stopped queue of the pod's device is lost (docs/limits.md)
	}
	load := lab.NewLoad(t)
	load.Use(client.Sandbox, targets(), pace)
	load.More(20)
	n.setOptOuts(t, optedOut(client))
	n.expectOptOuts(t, "opted out", list{client: byPod})
	// Enough for source ports to be used again, for the backend itself.
	load.More(1000)
	ask("opted out", true)
	if node, outside := outcomesOf(t, n.tier); node.Connections == 0 || outside != (proxier.Outcomes{}) {
		t.Errorf("a pod that opted out counts as %+v on the node and %+v outside", node, outside)
	}
	onDevice, err := client.Dial(t.Context(), "tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	defer onDevice.Close()
	finder := n.tier.optOuts.Finder
	n.tier.optOuts.Finder = podns.New(t.TempDir())
	n.setOptOuts(t, optedOut(client))
	n.expectOptOuts(t, "without a process of the pod", list{client: byPod})
	n.tier.optOuts.Finder = finder
	n.setOptOuts(t, optedOut())
	n.expectOptOuts(t, "back", nil)
	load.More(2000)
	load.End()
	ask("back", false)
	for what, c := range map[string]net.Conn{"translated at its socket": atSocket, "translated on the device": onDevice} {
		if _, err := lab.AskConn(t.Context(), c); err != nil {
			t.Errorf("a connection %s: %v", what, err)
		}
	}

	// An opt-out by command is not a pod's, nor the other way round.
	i := inspectNode(t, one)
	if err := i.AddOptOut(cookieOf(t, other.Sandbox)); err != nil {
		t.Fatal(err)
	}
	n.setOptOuts(t, optedOut(client, other))
	n.expectOptOuts(t, "by command as well", list{client: byPod, other: byCommand})
	if _, err := i.RemoveOptOut(cookieOf(t, other.Sandbox)); err != nil {
		t.Fatal(err)
	}
	n.setOptOuts(t, optedOut(client, other))
	n.expectOptOuts(t, "not by command any more", list{client: byPod, other: byPod})
	n.setOptOuts(t, optedOut(client))
	if err := i.AddOptOut(cookieOf(t, other.Sandbox)); err != nil {
		t.Fatal(err)
	}

	// The next process knows nothing at first.
	again := func(sizes lbmap.Sizes) {
		n.close()
		n.start(t, Options{Sizes: sizes})
		if err := n.tier.SetUplinks(t.Context(), uplinksOf(t, one)); err != nil {
			t.Fatal(err)
		}
		n.OnServiceAdd(dualService())
		n.setPods(web)
		n.sync(t)
		if err := n.tier.syncOptOuts(t.Context()); err != nil {
			t.Fatal(err)
		}
		n.expectOptOuts(t, "another process", list{client: byPod, other: byCommand})
	}
	again(lbmap.Sizes{})
	incomplete := optedOut()
	incomplete.Complete = false
	n.setOptOuts(t, incomplete)
	n.expectOptOuts(t, "while not all pods are known", list{client: byPod, other: byCommand})
	ask("another process", true)
	again(lbmap.Sizes{Frontends: 1 << 11, OptOuts: 32})
	ask("other maps", true)
	n.setOptOuts(t, optedOut(client))
	n.setOptOuts(t, incomplete)
	n.expectOptOuts(t, "what this process saw", list{other: byCommand})
	n.setOptOuts(t, optedOut(client))
	again(lbmap.Sizes{})
	n.setOptOuts(t, optedOut())
	n.expectOptOuts(t, "once all pods are known", list{other: byCommand})
}

// TestOptOutsThatFail: a pod whose processes are not found, and one for which there is no room, are reported, and
// others are not affected.
func TestOptOutsThatFail(t *testing.T) {
	l := lab.NewT(t, lab.Options{Pause: true})
	one := l.Node("node1")
	web, client, other := serve(t, one.Pod("web")), one.Pod("client"), one.Pod("other")
	var problems []string
	n := newNode(t, one, l, Options{
		Sizes: lbmap.Sizes{Frontends: 64, Services: 64, Backends: 64, Slots: 64, Affinity: 64, UDPPeers: 64, OptOuts: 2},
		Reporter: proxier.ReporterFunc(func(p proxier.Problem) {
			problems = append(problems, fmt.Sprintf("%s %s %s %s: %s", p.Kind, p.Object, p.Reason, p.Field, p.Message))
		}),
	})
	n.OnServiceAdd(dualService())
	n.setPods(web)
	n.sync(t)
	expect := func(what string, texts ...string) {
		t.Helper()
		if len(problems) != len(texts) {
			t.Fatalf("%s: %q, want %d problems", what, problems, len(texts))
		}
		for i, text := range texts {
			if !strings.Contains(problems[i], text) {
				t.Errorf("%s: %s; want %s", what, problems[i], text)
			}
		}
		problems = nil
	}
	if err := inspectNode(t, one).AddOptOut(cookieOf(t, other.Sandbox)); err != nil {
		t.Fatal(err)
	}
	want := map[*lab.Pod]lbmap.OptOutBy{client: lbmap.OptOutByPod, other: lbmap.OptOutByCommand}
	n.setOptOuts(t, optedOut(client))
	n.expectOptOuts(t, "room", want)
	expect("room")
	n.setOptOuts(t, optedOut(client, web))
	n.expectOptOuts(t, "no room", want)
	expect("no room", "Pod shop/web Capacity metadata.annotations[tandem-proxy.dev/socket-lb]: all 2 opt-outs are in use")

	// A pod that runs in a place that this process does not see.
	hidden := optedOut(client, web)
	hidden.Pods[1].CgroupUID = "none"
	n.setOptOuts(t, hidden)
	expect("just started")
	n.tier.optOuts.Finder.Now = func() time.Time { return time.Now().Add(time.Minute) }
	n.setOptOuts(t, hidden)
	n.expectOptOuts(t, "hidden", want)
	expect("hidden", "Pod shop/web Unsupported metadata.annotations[tandem-proxy.dev/socket-lb]: no process of the pod was found")
}
