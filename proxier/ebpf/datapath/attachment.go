// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Attachment is one program of the proxy on one hook.
type Attachment struct {
	Hook    ciliumebpf.AttachType
	Program *ciliumebpf.Program
}

// FindAttached returns the programs of the proxy on a cgroup, in the order of the
// hooks. They are recognised by name, and by map tdm_meta.
func FindAttached(cgroup *os.File) (found []Attachment, err error) {
	defer func() {
		if err != nil {
			CloseAttached(found)
			found = nil
		}
	}()
	// The library reports a missing privilege as a missing feature, and hooks would look
	// empty.
	if _, err := ciliumebpf.ProgramGetNextID(0); errors.Is(err, unix.EPERM) {
		return nil, fmt.Errorf("find the programs of %s: %w: CAP_SYS_ADMIN is needed", cgroup.Name(), err)
	}
	for _, h := range Hooks {
		result, err := link.QueryPrograms(link.QueryOptions{Target: int(cgroup.Fd()), Attach: h.Attach})
		if errors.Is(err, unix.EINVAL) || errors.Is(err, link.ErrNotSupported) {
			continue // a kernel without the hook
		}
		if err != nil {
			return found, fmt.Errorf("query programs of %s on %s: %w", h.Attach, cgroup.Name(), err)
		}
		for _, at := range result.Programs {
			program, err := ciliumebpf.NewProgramFromID(at.ID)
			if errors.Is(err, os.ErrNotExist) {
				continue // detached this moment
			}
			if err != nil {
				return found, fmt.Errorf("open program %d of %s: %w", at.ID, h.Attach, err)
			}
			if !IsOwnProgram(program) {
				program.Close()
				continue
			}
			found = append(found, Attachment{h.Attach, program})
		}
	}
	return found, nil
}

// IsBare reports whether the hooks of a cgroup have no program at all. It needs CAP_NET_ADMIN, and
// returns false without.
func IsBare(cgroup *os.File) bool {
	for _, h := range Hooks {
		result, err := link.QueryPrograms(link.QueryOptions{Target: int(cgroup.Fd()), Attach: h.Attach})
		if errors.Is(err, unix.EINVAL) {
			continue // a kernel without the hook
		}
		if err != nil || len(result.Programs) > 0 {
			return false
		}
	}
	return true
}

// ownPrograms are the ids of programs that are known to be the proxy's. The kernel gives an id anew after two billion others, and to look at
// all maps of all programs takes ten milliseconds.
var ownPrograms sync.Map

// IsOwnProgram reports whether a program is the proxy's, by its name and its maps: others may use
// the name.
func IsOwnProgram(program *ciliumebpf.Program) bool {
	info, err := program.Info()
	if err != nil || !strings.HasPrefix(info.Name, lbmap.NamePrefix) {
		return false
	}
	id, ok := info.ID()
	if _, known := ownPrograms.Load(id); ok && known {
		return true
	}
	maps, err := lbmap.MapsOf(program)
	if err != nil {
		return false
	}
	defer maps.Close()
	own := maps["tdm_meta"] != nil
	if own && ok {
		ownPrograms.Store(id, struct{}{})
	}
	return own
}

// CloseAttached closes what FindAttached opened.
func CloseAttached(list []Attachment) {
	for _, a := range list {
		a.Program.Close()
	}
}

// attach puts the programs on the cgroup. An earlier one of the proxy
// is replaced in place, so that there is no moment without one. The cgroup alone holds the
// attachment, so it outlives this process.
func attach(cgroup *os.File, list *SocketPrograms, earlier []Attachment) error {
	for i, h := range Hooks {
		if list[i] == nil {
			continue
		}
		opts := link.RawAttachProgramOptions{Target: int(cgroup.Fd()), Program: list[i], Attach: h.Attach, Flags: unix.BPF_F_ALLOW_MULTI}
		var surplus []Attachment // two processes that started at once leave two
		for _, e := range earlier {
			switch {
			case e.Hook != h.Attach:
			case opts.Anchor == nil:
				opts.Anchor = link.ReplaceProgram(e.Program)
			default:
				surplus = append(surplus, e)
			}
		}
		if err := link.RawAttachProgram(opts); err != nil {
			return attachError(cgroup, h.Attach, err)
		}
		for _, e := range surplus {
			if err := Detach(cgroup, e); err != nil {
				return err
			}
		}
	}
	return nil
}

func attachError(cgroup *os.File, hook ciliumebpf.AttachType, err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("attach %s to %s: %w: CAP_NET_ADMIN and CAP_BPF are needed, and no program may be attached there exclusively (see bpftool cgroup show)", hook, cgroup.Name(), err)
	case errors.Is(err, unix.E2BIG):
		return fmt.Errorf("attach %s to %s: %w: 64 programs are attached already", hook, cgroup.Name(), err)
	}
	return fmt.Errorf("attach %s to %s: %w", hook, cgroup.Name(), err)
}

// Detach takes a program off the cgroup. It succeeds if the program is off already.
func Detach(cgroup *os.File, a Attachment) error {
	err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: int(cgroup.Fd()), Program: a.Program, Attach: a.Hook})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("detach %s from %s: %w", a.Hook, cgroup.Name(), err)
	}
	return nil
}
