// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// Results are the errors of cells; nil for those that are as they should be.
type Results map[Cell]error

// sizes of the transfers. The datagrams are the largest ones without fragmentation, one that
// needs it after encapsulation, and one that always needs it.
const transferSize = 1 << 20

var datagrams = []int{1172, 1412, 1472, 4000}

// atOnce is how many cells are played at the same time.
const atOnce = 24

// patience is for a cell with an answer, silence for one that must not have any.
var (
	patience = 4 * time.Second * lab.Slower()
	silence  = 500 * time.Millisecond * lab.Slower()
)

// Play plays cells at once; not those of kinds Life and Gap, in which something happens.
func (w *World) Play(ctx context.Context, cells []Cell) Results {
	var mu sync.Mutex
	var all sync.WaitGroup
	results, slots := Results{}, make(chan struct{}, atOnce)
	for _, c := range cells {
		all.Go(func() {
			slots <- struct{}{}
			err := w.play(ctx, c)
			<-slots
			mu.Lock()
			defer mu.Unlock()
			results[c] = err
		})
	}
	all.Wait()
	return results
}

func (w *World) client(name string) *lab.Sandbox {
	switch name {
	case FromPod:
		return w.Pod.Sandbox
	case FromHost:
		return w.Node.Sandbox
	}
	return w.Outsiders[name].Sandbox
}

// introduce sends requests of the virtual machine, if there is one, until one is answered: programs
// serve its pod after its first packets, which are lost.
func (w *World) introduce(ctx context.Context) error {
	if w.Outsiders[FromVM] == nil {
		return nil
	}
	c := Cell{Client: FromVM, Frontend: ClusterIP, Network: "udp" + string(w.families()[0]), Backend: Here, Policy: Cluster, Kind: Request}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		once, stop := context.WithTimeout(ctx, silence)
		err := w.play(once, c)
		stop()
		if err == nil || ctx.Err() != nil {
			return err
		}
	}
}

func (w *World) play(ctx context.Context, c Cell) error {
	switch c.Kind {
	case Transfer:
		return w.transfer(ctx, c)
	case Crowd:
		return w.crowd(ctx, c)
	}
	want := w.wants(c)
	limit := w.limit(c)
	if len(want) == 0 {
		limit = silence
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	reply, err := w.client(c.Client).Ask(ctx, c.protocol(), w.target(c))
	switch {
	case err != nil && len(want) == 0:
		return nil
	case err != nil:
		return err
	case len(want) == 0:
		return fmt.Errorf("%s answered, want no answer", reply.Server)
	case !slices.Contains(want, reply.Server):
		return fmt.Errorf("%s answered, want %s", reply.Server, strings.Join(want, " or "))
	}
	if own := w.clientAddress(c); c.Policy == Local && c.outside() && reply.Peer.Addr() != own {
		return fmt.Errorf("the server saw the client %s, want %s", reply.Peer.Addr(), own)
	}
	return nil
}

// clientAddress is the source of a cell's packets.
func (w *World) clientAddress(c Cell) netip.Addr {
	if addr, ok := w.Clients[c.Client].Addresses[c.family()]; ok {
		return netip.MustParseAddr(addr)
	}
	return address(w.client(c.Client), c.family())
}

// wants returns who may answer on this profile.
func (w *World) wants(c Cell) []string {
	if matching(w.Denied, c) != nil {
		return nil
	}
	for _, a := range w.Answers {
		if c.Matches(a.Cells) {
			return []string{a.By}
		}
	}
	return c.wants()
}

// limit is how long a cell waits for an answer: longer than a lost packet costs, unless the cell
// is known to have none.
func (w *World) limit(c Cell) time.Duration {
	if matching(w.Lost, c) != nil || matching(w.Neither, c) != nil {
		return 2 * silence
	}
	return patience
}

func (w *World) transfer(ctx context.Context, c Cell) error {
	ctx, cancel := context.WithTimeout(ctx, 2*w.limit(c))
	defer cancel()
	from, to := w.client(c.Client), w.target(c)
	if c.protocol() == "tcp" {
		return from.Bulk(ctx, to, transferSize)
	}
	conn, err := from.Dial(ctx, "udp", to)
	if err != nil {
		return err
	}
	defer conn.Close()
	for _, size := range datagrams {
		// The first ones of a size may be lost to path MTU discovery.
		const tries = 4
		for try := range tries {
			once, cancel := context.WithTimeout(ctx, silence)
			if err = lab.EchoConn(once, conn, size); err == nil || try == tries-1 {
				cancel()
				break
			}
			<-once.Done()
			cancel()
		}
		if err != nil {
			return errors.Join(fmt.Errorf("echo of %d bytes", size), err)
		}
	}
	return nil
}

// lost are the cells with errors.
func (r Results) lost() (list []Cell) {
	for c, err := range r {
		if err != nil {
			list = append(list, c)
		}
	}
	slices.SortFunc(list, func(a, b Cell) int { return strings.Compare(a.String(), b.String()) })
	return list
}
