// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/removal"
	"github.com/tandem-proxy/tandem/test/foreign"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// repairLimit is how long a repair may take on a very busy machine. It takes a second otherwise, and
// half a minute by a full sync.
const repairLimit = 10 * time.Second

// repairs receives the repairs of a tier.
type repairs struct {
	list chan proxier.Repair
	// isSlow says that the verifier takes many seconds, as on an emulated machine: repairs that load
	// programs do, too.
	isSlow bool
}

func newRepairs() *repairs { return &repairs{list: make(chan proxier.Repair, 64)} }

func (r *repairs) add(one proxier.Repair) { r.list <- one }

// expect waits for a repair of a kind.
func (r *repairs) expect(t *testing.T, state proxier.RepairedState, says string) {
	t.Helper()
	start := time.Now()
	for limit := time.After(2 * patience); ; {
		select {
		case one := <-r.list:
			t.Logf("after %v: %s: %s", time.Since(start).Round(time.Millisecond), one.State, one.What)
			if one.State != state {
				continue
			}
			if !strings.Contains(one.What, says) {
				t.Errorf("repaired %q, want %q", one.What, says)
			}
			if took := time.Since(start); took > repairLimit && !r.isSlow {
				t.Errorf("the repair took %v", took)
			}
			return
		case <-limit:
			t.Fatalf("no repair of %s within %v", state, patience)
		}
	}
}

// run runs the tier until the test ends.
func (n *node) run(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); n.tier.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
}

// uplink is the index of the node's device.
func (e *edge) uplink(t *testing.T) int {
	t.Helper()
	l, err := e.at.Netlink().LinkByName(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	return l.Attrs().Index
}

// detachFrom takes the proxy's programs off one direction of the uplink, as another process would.
func (e *edge) detachFrom(t *testing.T, directions ...tc.Direction) {
	t.Helper()
	err := e.at.Do(func() error {
		var errs []error
		for _, d := range directions {
			found, err := tc.Find(e.uplink(t), d, datapath.IsOwnProgram)
			if err != nil || len(found) == 0 {
				return errors.Join(err, errors.New("nothing is attached"))
			}
			for _, a := range found {
				errs = append(errs, tc.Detach(a))
			}
			tc.Close(found)
		}
		return errors.Join(errs...)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// overtake attaches a foreign program ahead of the proxy's, which accepts all packets.
func (e *edge) overtake(t *testing.T, method tc.Method, d tc.Direction) (remove func()) {
	t.Helper()
	undo, err := foreign.PutFirst(e.at.Sandbox, lab.Uplink, method, d)
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := undo(); err != nil {
			t.Error(err)
		}
	}
}

// TestRepairOfDevices: programs that others take off a device are attached again, and
// move past foreign ones that were attached ahead. Established connections of clients outside
// continue.
func TestRepairOfDevices(t *testing.T) {
	for _, method := range []tc.Method{tc.TCX, tc.Clsact} {
		t.Run(method.String(), func(t *testing.T) {
			if method == tc.TCX {
				kernel.Needs(t, capabilities.TCX)
			}
			repaired, start := newRepairs(), time.Now()
			e := newEdge(t, Options{TC: method, Repaired: repaired.add})
			repaired.isSlow = time.Since(start) > 5*time.Second
			pods := []*lab.Pod{serve(t, e.here), serve(t, e.there)}
			e.use(t, pods...)
			e.run(t)
			load := newLoad(t, e, 4)
			rest := []use{newTCP, newUDP} // new connections cannot bear it
			held := e.tier.hold != nil && !repaired.isSlow
			if !held { // Linux before 6.4, or repairs that take longer than clients wait
				rest = append(rest, open)
			}
			for _, step := range []struct {
				name  string
				spoil func() (undo func())
				state proxier.RepairedState
				says  string
			}{
				{"detached at ingress", func() func() { e.detachFrom(t, tc.Ingress); return nil }, proxier.RepairedDevice, "no program at ingress"},
				{"detached at egress", func() func() { e.detachFrom(t, tc.Egress); return nil }, proxier.RepairedDevice, "no program at egress"},
				{"detached", func() func() { e.detachFrom(t, tc.Egress, tc.Ingress); return nil }, proxier.RepairedDevice, "no program at"},
				{"overtaken at ingress", func() func() { return e.overtake(t, method, tc.Ingress) }, proxier.RepairedOrder, "runs first: foreign (id "},
				{"overtaken at egress", func() func() { return e.overtake(t, method, tc.Egress) }, proxier.RepairedOrder, "runs first: foreign (id "},
			} {
				if testing.Short() && strings.HasPrefix(step.name, "detached at") {
					continue // both at once is the worst
				}
				for _, use := range rest {
					load.rests[use].Lock()
				}
				if !held {
					allAcknowledged(t, pods...)
				}
				undo := step.spoil()
				repaired.expect(t, step.state, step.says)
				if step.name == "detached" { // the other direction
					repaired.expect(t, step.state, step.says)
				}
				for _, use := range rest {
					load.rests[use].Unlock()
				}
				load.allAnswered(t, step.name)
				if undo != nil {
					undo()
				}
				for _, u := range e.tier.Uplinks() {
					if u.Err != nil {
						t.Errorf("%s: uplink %s: %v", step.name, u.Name, u.Err)
					}
				}
			}
			load.stop()
			if n := load.counts(); n.broken > 0 || n.failed > 0 {
				t.Errorf("%d of %d connections broke, %d of %d new ones failed", n.broken, len(load.open), n.failed, n.fresh)
			}
		})
	}
}

// TestContested: software that puts itself first after each repair is not fought for ever. The
// uplink is reported, until the other program is gone.
func TestContested(t *testing.T) {
	kernel.Needs(t, capabilities.TCX)
	repaired := newRepairs()
	problems := make(chan proxier.Problem, 16)
	e := newEdge(t, Options{Repaired: repaired.add, Reporter: proxier.ReporterFunc(func(p proxier.Problem) { problems <- p })})
	e.use(t, serve(t, e.here))
	e.run(t)
	for range 3 {
		undo := e.overtake(t, tc.TCX, tc.Ingress)
		repaired.expect(t, proxier.RepairedOrder, "runs first: foreign (id ")
		defer undo()
	}
	undo := e.overtake(t, tc.TCX, tc.Ingress)
	select {
	case p := <-problems:
		if p.Kind != "Node" || p.Reason != proxier.ReasonBypassed || !strings.Contains(p.Message, "on device eth0 at ingress, another program runs first: foreign (id ") {
			t.Errorf("%+v", p)
		}
	case <-time.After(patience):
		t.Fatal("the contest is not reported")
	}
	if u := e.tier.Uplinks(); len(u) != 1 || !errors.Is(u[0].Err, datapath.ErrContested) {
		t.Errorf("%+v", u)
	}
	undo()
	waitFor(t, "the uplink to be in order", func() bool { return e.tier.Uplinks()[0].Err == nil })
	if len(repaired.list) > 0 {
		t.Errorf("fought on: %v", <-repaired.list)
	}
	for _, n := range e.entries() {
		e.visit(t, n)
	}
}

// TestDevicesRecreated: a device that is deleted and created again, again and again, resets no
// connection of clients outside that are in use all the time.
func TestDevicesRecreated(t *testing.T) {
	e := newEdge(t, Options{})
	e.use(t, serve(t, e.here), serve(t, e.there))
	kernel.Needs(t, capabilities.NetfilterHook)
	e.run(t)
	told, stop := watchUplinks(t, e)
	defer stop()
	load := newLoad(t, e, 8)
	rounds := 40
	if testing.Short() {
		rounds = 4
	}
	load.rests[newTCP].Lock() // new connections are refused without a device
	load.rests[newUDP].Lock()
	for range rounds {
		replug(t, e, told)
		load.allAnswered(t, "after another device")
	}
	load.rests[newUDP].Unlock()
	load.rests[newTCP].Unlock()
	load.allAnswered(t, "in the end")
	load.stop()
	n := load.counts()
	t.Logf("%d requests over %d open connections", n.open, len(load.open))
	if n.broken > 0 || n.failed > 0 {
		t.Errorf("%d of %d connections broke, %d of %d new ones failed", n.broken, len(load.open), n.failed, n.fresh)
	}
}

// TestRepairOfCgroup: programs that others take off the cgroup are attached again. Established connections continue all the
// time, as their sockets were translated when they connected.
func TestRepairOfCgroup(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	a := serve(t, one.Pod("a"))
	repaired := newRepairs()
	n := newNode(t, one, l, Options{Repaired: repaired.add, Signals: true})
	n.OnServiceAdd(dualService())
	n.setPods(a)
	n.sync(t)
	n.run(t)
	var established []net.Conn
	for _, to := range []netip.Addr{vip4, vip6} {
		for _, network := range []string{"tcp", "udp"} {
			c, err := one.Dial(t.Context(), network, netip.AddrPortFrom(to, 80))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			established = append(established, c)
		}
	}
	continues := func(when string) {
		t.Helper()
		for _, c := range established {
			if _, err := lab.AskConn(t.Context(), c); err != nil {
				t.Errorf("%s: %s connection to %s: %v", when, c.RemoteAddr().Network(), c.RemoteAddr(), err)
			}
		}
	}
	continues("before")
	if removed, err := removal.Programs(n.tier.cgroup, func() ([]string, error) { return nil, nil }); err != nil || len(removed) != datapath.GuardHook {
		t.Fatalf("%v %v", removed, err)
	}
	continues("without programs")
	repaired.expect(t, proxier.RepairedCgroup, "tdm_connect4")
	continues("repaired")
	if _, err := one.Ask(t.Context(), "tcp", netip.AddrPortFrom(vip4, 80)); err != nil {
		t.Error(err)
	}
}
