// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// ErrNotRunning says that no program of Tandem is attached to the cgroup.
var ErrNotRunning = errors.New("no program of Tandem is attached to the cgroup")

// Inspector reads the maps of the attached programs. It holds no lock and opens the maps for
// reading only, so it works beside the process that writes them, and after its end. It shows
// the maps that were in use when it was opened.
type Inspector struct {
	cgroup   *os.File
	attached []datapath.Attachment
	Maps     lbmap.Maps
	tables   *lbmap.Tables
	memory   [][]byte
}

// Open opens the maps of the programs attached to a cgroup. To open
// objects by their id, CAP_SYS_ADMIN is needed; CAP_BPF does not suffice. To ask what is
// attached, Linux 6.1 needs CAP_NET_ADMIN, and 6.12 either of the two.
func Open(cgroupRoot string) (_ *Inspector, err error) {
	// Asked first: without the privilege, hooks look as if the kernel lacked them.
	if _, err := ciliumebpf.ProgramGetNextID(0); errors.Is(err, fs.ErrPermission) {
		return nil, fmt.Errorf("find the attached programs: %w", err)
	}
	cgroup, err := datapath.OpenCgroup(cgroupRoot)
	if err != nil {
		return nil, err
	}
	i := &Inspector{cgroup: cgroup, Maps: lbmap.Maps{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, i.Close())
		}
	}()
	if i.attached, err = datapath.FindAttached(cgroup); err != nil {
		return nil, err
	}
	if len(i.attached) == 0 {
		return nil, fmt.Errorf("%w: %s", ErrNotRunning, cgroupRoot)
	}
	if err := i.openMaps(); err != nil {
		return nil, err
	}
	if err := i.checkLayout(); err != nil {
		return nil, err
	}
	if err := i.openTables(); err != nil {
		return nil, err
	}
	return i, nil
}

// openMaps collects maps by name from the programs of all hooks, as none uses
// all of them. While a new process takes over, hooks differ in what they use;
// the first program that has the meta map decides whose maps are read.
func (i *Inspector) openMaps() error {
	order := slices.Clone(i.attached)
	for at, a := range order {
		names, err := i.addMaps(a.Program)
		if err != nil {
			return err
		}
		if slices.Contains(names, "tdm_meta") {
			break
		}
		if at == len(order)-1 {
			return fmt.Errorf("no program on %s has the map tdm_meta, which leads to the others; hooks without a program of the proxy: %s",
				i.cgroup.Name(), strings.Join(i.missingHooks(), ", "))
		}
		i.Maps.Close()
		i.Maps = lbmap.Maps{}
	}
	for _, a := range order {
		if _, err := i.addMaps(a.Program); err != nil {
			return err
		}
	}
	return nil
}

// addMaps opens those maps of a program whose names are not known yet.
func (i *Inspector) addMaps(program *ciliumebpf.Program) (names []string, err error) {
	info, err := program.Info()
	if err != nil {
		return nil, fmt.Errorf("inspect program: %w", err)
	}
	ids, ok := info.MapIDs()
	if !ok {
		return nil, errors.New("the kernel does not report the maps of a program")
	}
	for _, id := range ids {
		m, err := lbmap.OpenMapByID(id, unix.BPF_F_RDONLY)
		if err != nil {
			return nil, fmt.Errorf("open map %d: %w", id, err)
		}
		about, err := m.Info()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("inspect map %d: %w", id, err), m.Close())
		}
		name := about.Name
		if lbmap.HasOwnName(name) {
			names = append(names, name)
		}
		if !lbmap.HasOwnName(name) || i.Maps[name] != nil {
			m.Close()
			continue
		}
		i.Maps[name] = m
	}
	return names, nil
}

// checkLayout reads only the part of map tdm_meta that every version has.
func (i *Inspector) checkLayout() error {
	value, err := i.Maps["tdm_meta"].LookupBytes(uint32(0))
	if err != nil {
		return fmt.Errorf("read map tdm_meta: %w", err)
	}
	var head lbmap.Meta
	end := unsafe.Offsetof(head.Layout) + unsafe.Sizeof(head.Layout)
	if len(value) < int(end) {
		return fmt.Errorf("%w: %d bytes in tdm_meta", lbmap.ErrLayout, len(value))
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&head)), end), value)
	if head.Magic != lbmap.LayoutMagic || head.Layout != lbmap.LayoutVersion {
		return fmt.Errorf("%w: they have layout %d, this program reads %d", lbmap.ErrLayout, head.Layout, lbmap.LayoutVersion)
	}
	return nil
}

func (i *Inspector) openTables() error {
	t := &lbmap.Tables{}
	var meta []lbmap.Meta
	var slots []lbmap.Slots
	for _, step := range []func() error{
		func() error { return readOnlyMapping(i, "tdm_meta", &meta) },
		func() error { return readOnlyMapping(i, "tdm_set", &t.Sets) },
		func() error { return readOnlyMapping(i, "tdm_slot", &slots) },
		func() error { return readOnlyMapping(i, "tdm_backend", &t.Backends) },
		func() error { return readOnlyMapping(i, "tdm_service", &t.Services) },
		func() error { return readOnlyMapping(i, "tdm_svc_stats", &t.ServiceStats) },
		func() error { return readOnlyMapping(i, "tdm_be_stats", &t.BackendStats) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	frontends := i.Maps["tdm_frontend"]
	if frontends == nil {
		return fmt.Errorf("%w: no program uses map tdm_frontend", lbmap.ErrLayout)
	}
	if frontends.KeySize() != uint32(unsafe.Sizeof(lbmap.FrontendKey{})) || frontends.ValueSize() != uint32(unsafe.Sizeof(lbmap.FrontendValue{})) {
		return fmt.Errorf("%w: map tdm_frontend has keys of %d and values of %d bytes", lbmap.ErrLayout, frontends.KeySize(), frontends.ValueSize())
	}
	t.Slots = lbmap.FlatSlots(slots)
	t.Meta, t.Frontends = &meta[0], lbmap.NewFrontendMap(frontends)
	i.tables = t
	return nil
}

// readOnlyMapping views an array as Go values; a store there would end the
// process. The view ends with the Inspector.
func readOnlyMapping[T any](i *Inspector, name string, to *[]T) error {
	m := i.Maps[name]
	if m == nil {
		return fmt.Errorf("%w: no program uses map %s", lbmap.ErrLayout, name)
	}
	var element T
	size := int(unsafe.Sizeof(element))
	if int(m.ValueSize()) != size {
		return fmt.Errorf("%w: map %s has values of %d bytes, not %d", lbmap.ErrLayout, name, m.ValueSize(), size)
	}
	// The kernel maps no array of a descriptor that cannot write, whatever the
	// protection (6.18). This one is gone at the end of the function.
	writable, err := lbmap.Reopen(m, 0)
	if err != nil {
		return err
	}
	defer writable.Close()
	page := os.Getpagesize()
	length := int(m.MaxEntries()) * size
	b, err := unix.Mmap(writable.FD(), 0, (length+page-1)&^(page-1), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map the memory of %s: %w", name, err)
	}
	i.memory = append(i.memory, b)
	*to = unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), m.MaxEntries())
	return nil
}

// Close closes the maps. Values that other methods returned stay valid.
func (i *Inspector) Close() error {
	var errs []error
	for _, b := range i.memory {
		errs = append(errs, unix.Munmap(b))
	}
	i.memory, i.tables = nil, nil
	i.Maps.Close()
	datapath.CloseAttached(i.attached)
	return errors.Join(append(errs, i.cgroup.Close())...)
}
