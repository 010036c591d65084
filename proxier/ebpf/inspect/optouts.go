// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"errors"
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// OptOuts lists the network namespaces that are left alone by their cookies, and what opted them out.
func (i *Inspector) OptOuts() (map[uint64]lbmap.OptOutBy, error) {
	m := i.Maps["tdm_optout"]
	if m == nil {
		return nil, fmt.Errorf("%w: no program uses map tdm_optout", lbmap.ErrLayout)
	}
	return lbmap.OptOuts(m)
}

// AddOptOut opts out a network namespace: the programs do not translate its sockets any more. Connected
// sockets stay as they are. Adding a namespace again succeeds. One that a pod opted out stays so when the pod
// does not ask for it any more.
func (i *Inspector) AddOptOut(cookie uint64) error {
	if cookie == 0 {
		return errors.New("0 is not the cookie of a network namespace")
	}
	return i.withOptOuts(func(m *ciliumebpf.Map) error {
		err := m.Put(cookie, uint8(lbmap.OptOutByCommand))
		if errors.Is(err, unix.E2BIG) {
			return fmt.Errorf("add opt-out %d: all %d entries are in use; remove those of deleted network namespaces: %w", cookie, m.MaxEntries(), err)
		}
		if err != nil {
			return fmt.Errorf("add opt-out %d: %w", cookie, err)
		}
		return nil
	})
}

// RemoveOptOut ends an opt-out, and reports whether there was one. A running process adds one again that a pod
// asks for.
func (i *Inspector) RemoveOptOut(cookie uint64) (existed bool, err error) {
	err = i.withOptOuts(func(m *ciliumebpf.Map) error {
		err := m.Delete(cookie)
		if errors.Is(err, ciliumebpf.ErrKeyNotExist) {
			return nil
		}
		existed = err == nil
		if err != nil {
			return fmt.Errorf("remove opt-out %d: %w", cookie, err)
		}
		return nil
	})
	return existed, err
}

// withOptOuts opens the one map that others than the running process may write.
func (i *Inspector) withOptOuts(fn func(*ciliumebpf.Map) error) error {
	m := i.Maps["tdm_optout"]
	if m == nil {
		return fmt.Errorf("%w: no program uses map tdm_optout", lbmap.ErrLayout)
	}
	writable, err := lbmap.Reopen(m, 0)
	if err != nil {
		return err
	}
	defer writable.Close()
	return fn(writable)
}
