// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"errors"
	"fmt"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// echoAddrs are the addresses at which echo requests are answered. An address is
// usually that of several frontends.
type echoAddrs struct {
	table lbmap.SmallMap[[4]uint32, uint8]
	users map[[4]uint32]int
	// written are the addresses in the table, dirty those that may have to get
	// into it, or out of it.
	written, dirty map[[4]uint32]struct{}
}

func newEchoAddrs(table lbmap.SmallMap[[4]uint32, uint8]) echoAddrs {
	return echoAddrs{table, map[[4]uint32]int{}, map[[4]uint32]struct{}{}, map[[4]uint32]struct{}{}}
}

func answersEcho(f lbmap.FrontendEntry) bool {
	return proxier.Kind(f.Value.Flags >> lbmap.FrontendKindShift).AnswersEcho()
}

// load reads what a previous process wrote.
func (v *echoAddrs) load() error {
	err := v.table.Dump(func(addr [4]uint32, _ uint8) {
		v.written[addr], v.dirty[addr] = struct{}{}, struct{}{}
	})
	if err != nil {
		return fmt.Errorf("read the addresses that answer echo requests: %w", err)
	}
	return nil
}

// replace says that a service port has other frontends than before.
func (v *echoAddrs) replace(before, after []lbmap.FrontendEntry) {
	for _, f := range after {
		if answersEcho(f) {
			v.use(f.Key.Addr, 1)
		}
	}
	for _, f := range before {
		if answersEcho(f) {
			v.use(f.Key.Addr, -1)
		}
	}
}

func (v *echoAddrs) use(addr [4]uint32, n int) {
	before := v.users[addr]
	if v.users[addr] = before + n; before+n == 0 {
		delete(v.users, addr)
	}
	if before == 0 || before+n == 0 {
		v.dirty[addr] = struct{}{}
	}
}

// write brings the addresses into the table, and returns how many it wrote.
// What fails is tried again the next time.
func (v *echoAddrs) write() (writes int, err error) {
	var errs []error
	for addr := range v.dirty {
		_, used := v.users[addr]
		_, written := v.written[addr]
		var err error
		switch {
		case used && !written:
			if err = v.table.Put(addr, 1); err == nil {
				v.written[addr] = struct{}{}
			}
		case written && !used:
			if err = v.table.Delete(addr); err == nil {
				delete(v.written, addr)
			}
		}
		if err != nil {
			if len(errs) == 0 { // the others fail for the same reason
				errs = append(errs, fmt.Errorf("have %s answer echo requests: %w", lbmap.ToAddr(addr), err))
			}
			continue
		}
		if used != written {
			writes++
		}
		delete(v.dirty, addr)
	}
	return writes, errors.Join(errs...)
}
