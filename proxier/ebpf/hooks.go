// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/klog/v2"
)

// CgroupHooks keeps the socket programs attached to a cgroup.
type CgroupHooks struct {
	cgroup   *os.File
	programs programs
	guarded  bool // guardHook is attached
}

// TakeCgroupHooks takes the socket programs out of a loaded collection.
func TakeCgroupHooks(cgroup *os.File, collection *ciliumebpf.Collection) *CgroupHooks {
	h := &CgroupHooks{cgroup: cgroup}
	for i, hook := range hooks {
		h.programs[i] = collection.DetachProgram(hook.program)
	}
	return h
}

// Bind has the programs hold maps that they do not use: nothing else would keep those
// once this process is gone, or tell the next one where they are (BPF_PROG_BIND_MAP,
// Linux 5.10). Any program that stays does.
func (h *CgroupHooks) Bind(maps Maps) error {
	for _, program := range h.programs {
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

// Attach attaches the programs in place of earlier ones, but for the one that is not
// always needed.
func (h *CgroupHooks) Attach(earlier []attached) error {
	always := h.programs
	always[guardHook] = nil
	return attach(h.cgroup, &always, earlier)
}

// Guard has the packets that sockets send checked against source ranges.
func (h *CgroupHooks) Guard() error {
	if h.guarded {
		return nil
	}
	found, err := findAttached(h.cgroup)
	if err != nil {
		return err
	}
	defer closeAttached(found)
	var only programs
	only[guardHook] = h.programs[guardHook]
	if err := attach(h.cgroup, &only, found); err != nil {
		return err
	}
	h.guarded = true
	return nil
}

// Ensure attaches again what something else detached, and detaches the check of source
// ranges where guard says that it is not needed.
func (h *CgroupHooks) Ensure(ctx context.Context, guard bool) error {
	found, err := findAttached(h.cgroup)
	if err != nil {
		return err
	}
	defer closeAttached(found)
	if !h.guarded || !guard {
		h.guarded = false
		for _, a := range found {
			if a.hook == hooks[guardHook].attach {
				err = errors.Join(err, detach(h.cgroup, a))
			}
		}
	}
	var missing programs
	lost := 0
	for i, hook := range hooks {
		if i == guardHook && !h.guarded {
			continue
		}
		if h.programs[i] != nil && !slices.ContainsFunc(found, func(a attached) bool { return a.hook == hook.attach }) {
			missing[i] = h.programs[i]
			lost++
		}
	}
	if lost == 0 {
		return err
	}
	klog.FromContext(ctx).Info("eBPF programs were detached by another process; attaching them again", "cgroup", h.cgroup.Name(), "programs", lost)
	return errors.Join(err, attach(h.cgroup, &missing, nil))
}

// Close releases the programs; those that are attached stay so.
func (h *CgroupHooks) Close() { h.programs.close() }
