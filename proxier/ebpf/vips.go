// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"

	"github.com/tandem-proxy/tandem/proxier"
)

// vips are the addresses at which echo requests are answered. An address is
// usually that of several frontends.
type vips struct {
	table smallMap[[4]uint32, uint8]
	users map[[4]uint32]int
	// written are the addresses in the table; those without users go with the
	// next settle.
	written map[[4]uint32]struct{}
}

func answersEcho(f frontendEntry) bool {
	view := proxier.Frontend{Kind: proxier.Kind(f.value.Flags >> frontendKindShift)}
	return view.AnswersEcho()
}

// load reads what a previous process wrote.
func (v *vips) load() error {
	err := v.table.Dump(func(addr [4]uint32, _ uint8) { v.written[addr] = struct{}{} })
	if err != nil {
		return fmt.Errorf("read the addresses that answer echo requests: %w", err)
	}
	return nil
}

// replace says that a service port has other frontends than before.
func (v *vips) replace(before, after []frontendEntry) {
	for _, f := range after {
		if answersEcho(f) {
			v.users[f.key.Addr]++
		}
	}
	for _, f := range before {
		if !answersEcho(f) {
			continue
		}
		if v.users[f.key.Addr]--; v.users[f.key.Addr] == 0 {
			delete(v.users, f.key.Addr)
		}
	}
}

// settle brings the addresses into the table, and returns how many it wrote.
func (v *vips) settle() (writes int, err error) {
	var errs []error
	for addr := range v.users {
		if has(v.written, addr) {
			continue
		}
		if err := v.table.Put(addr, 1); err != nil {
			errs = append(errs, fmt.Errorf("have %s answer echo requests: %w", goAddr(addr), err))
			break // it is full, and so for the others
		}
		v.written[addr] = struct{}{}
		writes++
	}
	for addr := range v.written {
		if has(v.users, addr) {
			continue
		}
		if err := v.table.Delete(addr); err != nil {
			errs = append(errs, fmt.Errorf("have %s answer no echo requests: %w", goAddr(addr), err))
			continue
		}
		delete(v.written, addr)
		writes++
	}
	return writes, errors.Join(errs...)
}
