// SPDX-License-Identifier: Apache-2.0

package sockets

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Pair has the addresses of a connected socket, by which it is found.
type Pair struct{ Local, Remote netip.AddrPort }

func (f *Closer) addUntranslated(pairs sets.Set[Pair]) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.untranslated = f.untranslated.Union(pairs)
}

// TakeUntranslated returns the untranslated sockets to be closed, and clears them.
func (f *Closer) TakeUntranslated() sets.Set[Pair] {
	f.mu.Lock()
	defer f.mu.Unlock()
	pairs := f.untranslated
	f.untranslated = sets.New[Pair]()
	return pairs
}

// scope finds out which sockets the programs translate. Packets of other sockets are translated by
// rules or packet programs, or not at all.
type scope struct {
	cgroup  *os.File
	netns   netns.Namespace
	optOuts *ciliumebpf.Map
	left    proxier.Clients
}

// servedSockets is a snapshot of which sockets the programs translate.
type servedSockets struct {
	host     uint64 // cookie
	left     proxier.Clients
	optedOut sets.Set[uint64] // cookies
	cgroups  sets.Set[uint64] // ids; nil for all
}

func (h *scope) find() (servedSockets, error) {
	found := servedSockets{left: h.left}
	err := h.netns.Do(func() (err error) { found.host, err = netns.Cookie(); return err })
	if err != nil {
		return found, err
	}
	cookies, err := lbmap.Keys[uint64, uint8](h.optOuts)
	if err != nil {
		return found, fmt.Errorf("read the opt-outs: %w", err)
	}
	found.optedOut = sets.New(cookies...)
	if found.cgroups, err = cgroupsBelow(h.cgroup.Name()); err != nil {
		return found, fmt.Errorf("list the cgroups: %w", err)
	}
	return found, nil
}

// here reports whether they translate sockets of the current network namespace.
func (h *servedSockets) here() (bool, error) {
	cookie, err := netns.Cookie()
	origin := proxier.FromPod
	if cookie == h.host {
		origin = proxier.FromHost
	}
	return err == nil && !h.optedOut.Has(cookie) && !h.left[origin], err
}

// cgroup reports whether they translate sockets of a cgroup.
func (h *servedSockets) cgroup(id uint64) bool { return h.cgroups == nil || h.cgroups.Has(id) }

// rootCgroup is the id of the cgroup that every other one is below.
const rootCgroup = 1

// cgroupsBelow returns the ids of a cgroup and of all below it, or nil if that is all of them.
func cgroupsBelow(root string) (sets.Set[uint64], error) {
	ids := sets.New[uint64]()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist) && path != root:
			return nil // gone meanwhile
		case err != nil:
			return err
		case !d.IsDir():
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return nil // likewise
		}
		id := info.Sys().(*syscall.Stat_t).Ino
		if id == rootCgroup {
			ids = nil
			return fs.SkipAll
		}
		ids.Insert(id)
		return nil
	})
	return ids, err
}
