// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// Disturbance is something that changes on the node and in its network under traffic, again and
// again.
type Disturbance struct {
	Name string
	// Steps are done in turn, Every so often; the last one restores everything.
	Steps []Step
	Every time.Duration
	// Cycles of all steps, and those in short test runs.
	Cycles, Short int
}

// Step configures the node and the router.
type Step struct {
	Node, Fabric Setup
	// Damaged packets are sent after it, as many.
	Damaged int
	// Transfers are played after it.
	Transfers bool
}

// Damage is what others send that no program of theirs should. It is tested on the profiles of tunnels as well.
var Damage = Disturbance{Name: "damaged packets", Steps: []Step{{Damaged: 50}}, Every: 20 * time.Millisecond, Cycles: 40, Short: 5}

// Disturbances are those that are tested, on profile routed.
var Disturbances = []Disturbance{
	{
		Name: "addresses move to another device",
		Steps: []Step{
			{Node: Setup{
				IP: "link add br-ex type bridge\nlink set br-ex up\nlink set eth0 master br-ex\n",
				Each: `
address del {self}/{nodelen} dev eth0
address add {self}/{nodelen} dev br-ex{nodad}
route replace default via {router} dev br-ex
route replace {otherpods} via {peer} dev br-ex
` + podsOfLab,
			}},
			{Node: Setup{
				IP: "link set eth0 nomaster\n",
				Each: `
address del {self}/{nodelen} dev br-ex
address add {self}/{nodelen} dev eth0{nodad}
route replace default via {router} dev eth0
route replace {otherpods} via {peer} dev eth0
` + podsOfLab,
			}},
			{Node: Setup{IP: "link del br-ex\n"}},
		},
		Every: 300 * time.Millisecond, Cycles: 10, Short: 2,
	},
	{
		Name: "MTU changes",
		Steps: []Step{
			// First, as clients remember for minutes what they were told.
			{Node: Setup{Each: "route replace {otherpods} via {peer} dev eth0 mtu lock 1300\n"}, Transfers: true},
			{
				Node:   Setup{IP: "link set eth0 mtu 1280\n", Each: "route replace {otherpods} via {peer} dev eth0\n"},
				Fabric: Setup{IP: "link set node1 mtu 1280\n"},
			},
			{Node: Setup{IP: "link set eth0 mtu 1500\n"}, Fabric: Setup{IP: "link set node1 mtu 1500\n"}, Transfers: true},
		},
		Every: 100 * time.Millisecond, Cycles: 5, Short: 1,
	},
	{
		Name: "a route goes and returns ten times a second",
		Steps: []Step{
			{Node: Setup{Each: "route replace unreachable {otherpods}\n"}},
			{Node: Setup{Each: "route del unreachable {otherpods}\nroute replace {otherpods} via {peer} dev eth0\n"}},
		},
		Every: 50 * time.Millisecond, Cycles: 50, Short: 10,
	},
}

// podsOfLab restores the routes to the pods of the node, which the kernel deletes with its address.
const podsOfLab = "route replace {here} dev pod1 src {self}\nroute replace {client} dev pod2 src {self}\n"

// Disturb plays cells of kind Life during a disturbance: requests over open connections may take
// long, and datagrams get lost. No TCP connection may fail, and afterwards all of them continue,
// as do new ones and transfers.
func (w *World) Disturb(ctx context.Context, cells []Cell, d Disturbance, cycles int) (Results, error) {
	l := &life{world: w, results: Results{}, flows: map[Cell][]flow{}}
	over, end := context.WithCancel(ctx)
	defer end()
	for _, c := range cells {
		l.results[c] = nil
		l.open(ctx, c)
		for _, f := range l.flows[c] {
			l.running.Go(func() { l.use(over, ctx, c, f) })
		}
	}
	err := l.disturb(ctx, cells, d, cycles)
	end()
	l.running.Wait()
	for c, flows := range l.flows {
		for _, f := range flows {
			if err := l.again(ctx, c, f); err != nil {
				l.fail(c, fmt.Errorf("open connection to %s afterwards: %w", f.first.Server, err))
			}
			_ = f.Close()
		}
	}
	l.transfers(ctx, "afterwards")
	return l.results, err
}

// transfers plays those by TCP of all cells at once.
func (l *life) transfers(ctx context.Context, when string) {
	var all sync.WaitGroup
	for c := range l.flows {
		if c.protocol() != "tcp" {
			continue
		}
		all.Go(func() {
			play := c
			play.Kind = Transfer
			for _, play.Backend = range []string{Here, There} {
				if err := l.world.transfer(ctx, play); err != nil {
					l.fail(c, fmt.Errorf("transfer to %s %s: %w", play.Backend, when, err))
				}
			}
		})
	}
	all.Wait()
}

// disturb does the steps.
func (l *life) disturb(ctx context.Context, cells []Cell, d Disturbance, cycles int) error {
	w := l.world
	damager, err := w.damaging(cells)
	if err != nil {
		return err
	}
	tick := time.NewTicker(d.Every)
	defer tick.Stop()
	for range cycles {
		for i, s := range d.Steps {
			if err := errors.Join(w.apply(ctx, w.Lab.Fabric(), s.Fabric, w.Node, nil), w.apply(ctx, w.Node.Sandbox, s.Node, w.Node, nil)); err != nil {
				return fmt.Errorf("%s: %w", d.Name, err)
			}
			if err := damager.send(s.Damaged); err != nil {
				return fmt.Errorf("%s: %w", d.Name, err)
			}
			<-tick.C
			if s.Transfers {
				l.transfers(ctx, fmt.Sprintf("after step %d", i+1))
			}
		}
	}
	return damager.unsent()
}

// use sends one request after the other over a connection.
func (l *life) use(over, ctx context.Context, c Cell, f flow) {
	const pause = 5 * time.Millisecond
	for over.Err() == nil {
		once, cancel := context.WithTimeout(ctx, 4*patience)
		if c.protocol() == "udp" {
			once, cancel = context.WithTimeout(ctx, silence/5)
		}
		reply, err := lab.AskConn(once, f.Conn)
		cancel()
		if c.protocol() == "tcp" && (err != nil || reply != f.first) {
			l.fail(c, fmt.Errorf("open connection to %s: %v %w", f.first.Server, reply, err))
			return
		}
		select {
		case <-over.Done():
		case <-time.After(pause):
		}
	}
}

// again sends a request over a connection; datagrams are sent again.
func (l *life) again(ctx context.Context, c Cell, f flow) (err error) {
	for range 5 {
		once, cancel := context.WithTimeout(ctx, patience)
		if c.protocol() == "udp" {
			once, cancel = context.WithTimeout(ctx, silence)
		}
		var reply lab.Reply
		reply, err = lab.AskConn(once, f.Conn)
		cancel()
		if err == nil && reply != f.first {
			err = fmt.Errorf("%v instead of %v", reply, f.first)
		}
		if err == nil || c.protocol() == "tcp" {
			return err
		}
	}
	return err
}
