// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// CgroupHooks keeps the socket programs attached to a cgroup.
type CgroupHooks struct {
	cgroup   *os.File
	Programs SocketPrograms
	guarded  bool // GuardHook is attached
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
	always := h.Programs
	always[GuardHook] = nil
	return attach(h.cgroup, &always, earlier)
}

// Guard attaches the program that checks packets of sockets against source ranges.
func (h *CgroupHooks) Guard() error {
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
// ranges where guard says that it is not needed.
func (h *CgroupHooks) Ensure(ctx context.Context, guard bool) error {
	found, err := FindAttached(h.cgroup)
	if err != nil {
		return err
	}
	defer CloseAttached(found)
	if !h.guarded || !guard {
		h.guarded = false
		for _, a := range found {
			if a.Hook == Hooks[GuardHook].Attach {
				err = errors.Join(err, Detach(h.cgroup, a))
			}
		}
	}
	var missing SocketPrograms
	lost := 0
	for i, hook := range Hooks {
		if i == GuardHook && !h.guarded {
			continue
		}
		if h.Programs[i] != nil && !slices.ContainsFunc(found, func(a Attachment) bool { return a.Hook == hook.Attach }) {
			missing[i] = h.Programs[i]
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
func (h *CgroupHooks) Close() { h.Programs.close() }
