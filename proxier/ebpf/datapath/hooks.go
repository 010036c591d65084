// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/tandem-proxy/tandem/kernel/attached"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// CgroupHooks keeps the socket programs attached to a cgroup.
type CgroupHooks struct {
	cgroup   *os.File
	Programs SocketPrograms

	mu      sync.Mutex // held while programs are attached
	guarded bool       // GuardHook is attached
	ids     [len(Hooks)]ciliumebpf.ProgramID
}

// TakeCgroupHooks takes the socket programs out of a loaded collection.
func TakeCgroupHooks(cgroup *os.File, collection *ciliumebpf.Collection) *CgroupHooks {
	h := &CgroupHooks{cgroup: cgroup}
	for i, hook := range Hooks {
		h.Programs[i] = collection.DetachProgram(hook.Program)
	}
	return h
}

// Bind adds references to maps that the programs do not use (BPF_PROG_BIND_MAP, Linux 5.10). Without
// them, the kernel would free these maps when the process ends, and the next process could not find
// them. One program that stays attached is enough.
func (h *CgroupHooks) Bind(maps lbmap.Maps) error {
	for _, program := range h.Programs {
		if program == nil {
			continue
		}
		for _, m := range maps {
			if err := program.BindMap(m); err != nil {
				return fmt.Errorf("bind %s to a program: %w", m, err)
			}
		}
	}
	return nil
}

// Attach attaches the programs in place of earlier ones, except for the one of GuardHook.
func (h *CgroupHooks) Attach(earlier []Attachment) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	always := h.Programs
	always[GuardHook] = nil
	err := attach(h.cgroup, &always, earlier)
	for _, e := range earlier {
		if h.Programs[SignalHook] == nil && e.Hook == Hooks[SignalHook].Attach {
			err = errors.Join(err, Detach(h.cgroup, e))
		}
	}
	return err
}

// Replace attaches the programs in place of those of the proxy that are there, except for the one of GuardHook.
func (h *CgroupHooks) Replace() error {
	found, err := FindAttached(h.cgroup)
	if err != nil {
		return err
	}
	defer CloseAttached(found)
	return h.Attach(found)
}

// Guarded reports whether Guard attached its program, and nothing detached it since.
func (h *CgroupHooks) Guarded() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.guarded
}

// Guard attaches the program that checks packets of sockets against source ranges.
func (h *CgroupHooks) Guard() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.guarded {
		return nil
	}
	found, err := FindAttached(h.cgroup)
	if err != nil {
		return err
	}
	defer CloseAttached(found)
	var only SocketPrograms
	only[GuardHook] = h.Programs[GuardHook]
	if err := attach(h.cgroup, &only, found); err != nil {
		return err
	}
	h.guarded = true
	return nil
}

// Ensure attaches again what something else detached, and detaches the check of source
// ranges where guard says that it is not needed. It returns the names of the lost programs.
func (h *CgroupHooks) Ensure(guard bool) (lost []string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.guarded = h.guarded && guard
	found, err := FindAttached(h.cgroup)
	if err != nil {
		return nil, err
	}
	defer CloseAttached(found)
	if !h.guarded {
		for _, a := range found {
			if a.Hook == Hooks[GuardHook].Attach {
				err = errors.Join(err, Detach(h.cgroup, a))
			}
		}
	}
	lost, repairErr := h.attachMissing(func(hook int) (bool, error) {
		return slices.ContainsFunc(found, func(a Attachment) bool { return a.Hook == Hooks[hook].Attach }), nil
	})
	return lost, errors.Join(err, repairErr)
}

// Audit attaches again what something else detached, and returns the names of the lost
// programs. Unlike Ensure it opens no programs: it costs two system calls for each hook.
func (h *CgroupHooks) Audit() (lost []string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.attachMissing(func(hook int) (bool, error) {
		id, err := h.idOf(hook)
		if err != nil {
			return false, err
		}
		result, err := link.QueryPrograms(link.QueryOptions{Target: int(h.cgroup.Fd()), Attach: Hooks[hook].Attach})
		if err != nil {
			return false, fmt.Errorf("query programs of %s on %s: %w", Hooks[hook].Attach, h.cgroup.Name(), err)
		}
		return slices.ContainsFunc(result.Programs, func(at link.AttachedProgram) bool { return at.ID == id }), nil
	})
}

// attachMissing attaches programs that should be attached and are not.
func (h *CgroupHooks) attachMissing(isThere func(hook int) (bool, error)) (lost []string, err error) {
	var missing SocketPrograms
	for i, hook := range Hooks {
		if h.Programs[i] == nil || i == GuardHook && !h.guarded {
			continue
		}
		there, err := isThere(i)
		if err != nil {
			return nil, err
		}
		if !there {
			missing[i] = h.Programs[i]
			lost = append(lost, hook.Program)
		}
	}
	if len(lost) == 0 {
		return nil, nil
	}
	return lost, attach(h.cgroup, &missing, nil)
}

// idOf is the id of a loaded program, which never changes.
func (h *CgroupHooks) idOf(hook int) (ciliumebpf.ProgramID, error) {
	if h.ids[hook] == 0 {
		info, err := h.Programs[hook].Info()
		if err != nil {
			return 0, fmt.Errorf("inspect a socket program: %w", err)
		}
		h.ids[hook], _ = info.ID()
	}
	return h.ids[hook], nil
}

// Foreign are the programs of others on the hooks of the cgroup where one can refuse a call
// or change its destination, by name and id.
func (h *CgroupHooks) Foreign() (list []string) {
	programs, err := attached.On(h.cgroup)
	if err != nil {
		return nil
	}
	for _, p := range programs {
		if !strings.HasPrefix(p.Name, lbmap.NamePrefix) {
			list = append(list, fmt.Sprintf("%s (id %d) at %s", cmp.Or(p.Name, "a program"), p.ID, p.Hook))
		}
	}
	return list
}

// Close releases the programs; those that are attached stay so.
func (h *CgroupHooks) Close() { h.Programs.close() }
