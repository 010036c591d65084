// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"errors"
	"fmt"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/delta"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// echoAddrs are the addresses at which programs answer echo requests. An address usually has
// several frontends.
type echoAddrs struct {
	table lbmap.SmallMap[[4]uint32, uint8]
	users map[[4]uint32]int // frontends
	delta *delta.Delta[[4]uint32, bool, struct{}]
}

func newEchoAddrs(table lbmap.SmallMap[[4]uint32, uint8]) echoAddrs {
	return echoAddrs{table, map[[4]uint32]int{}, delta.New[[4]uint32, bool, struct{}](nil)}
}

func answersEcho(f lbmap.FrontendEntry) bool {
	return proxier.Kind(f.Value.Flags >> lbmap.FrontendKindShift).AnswersEcho()
}

// load reads what a previous process wrote.
func (e *echoAddrs) load() error {
	err := e.table.Dump(func(addr [4]uint32, _ uint8) { e.delta.Adopt(addr, struct{}{}) })
	if err != nil {
		return fmt.Errorf("read the addresses that answer echo requests: %w", err)
	}
	return nil
}

// replace updates the number of frontends per address, after those of a service port changed.
func (e *echoAddrs) replace(before, after []lbmap.FrontendEntry) {
	for _, f := range after {
		if answersEcho(f) {
			e.use(f.Key.Addr, 1)
		}
	}
	for _, f := range before {
		if answersEcho(f) {
			e.use(f.Key.Addr, -1)
		}
	}
}

func (e *echoAddrs) use(addr [4]uint32, n int) {
	before := e.users[addr]
	switch after := before + n; {
	case after == 0:
		delete(e.users, addr)
		e.delta.Drop(addr)
	default:
		e.users[addr] = after
		if before == 0 {
			e.delta.Want(addr, true)
		}
	}
}

// write applies pending changes to the table, and returns the number of writes. Failed changes are
// tried again by the next call.
func (e *echoAddrs) write() (writes int, err error) {
	var errs []error
	for addr, item := range e.delta.Pending() {
		var err error
		switch {
		case !item.Wanted():
			if err = e.table.Delete(addr); err == nil {
				e.delta.Removed(addr)
				writes++
			}
		case item.There() && !item.Unsure(): // a previous process wrote it
			e.delta.Done(addr, struct{}{})
		default:
			if err = e.table.Put(addr, 1); err == nil {
				e.delta.Done(addr, struct{}{})
				writes++
			}
		}
		if err != nil {
			e.delta.Failed(addr, err)
			if len(errs) == 0 { // the others fail for the same reason
				errs = append(errs, fmt.Errorf("enable echo replies of %s: %w", lbmap.ToAddr(addr), err))
			}
		}
	}
	return writes, errors.Join(errs...)
}
