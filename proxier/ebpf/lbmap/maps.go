// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Maps are maps of the programs, by name.
type Maps map[string]*ciliumebpf.Map

// NamePrefix begins the names of all programs and maps of the proxy.
const NamePrefix = "tdm_"

// MapsOf opens the maps of the proxy that these programs use, by name. Of several by one name it opens that of the first
// program.
func MapsOf(programs ...*ciliumebpf.Program) (Maps, error) {
	maps := Maps{}
	for _, program := range programs {
		if err := maps.Add(program); err != nil {
			maps.Close()
			return nil, err
		}
	}
	return maps, nil
}

// Add opens the maps of a program that are not there yet.
func (maps Maps) Add(program *ciliumebpf.Program) error {
	info, err := program.Info()
	if err != nil {
		return err
	}
	mapIDs, ok := info.MapIDs()
	if !ok {
		return errors.New("the kernel does not report the maps of a program")
	}
	for _, id := range mapIDs {
		m, err := ciliumebpf.NewMapFromID(id)
		if err != nil {
			return fmt.Errorf("open map %d: %w", id, err)
		}
		about, err := m.Info()
		if err != nil || !strings.HasPrefix(about.Name, NamePrefix) || maps[about.Name] != nil {
			m.Close()
			continue
		}
		maps[about.Name] = m
	}
	return nil
}

// Close closes all of them.
func (maps Maps) Close() {
	for _, m := range maps {
		m.Close()
	}
}

// HasOwnName reports whether a program or map of that name is the proxy's.
func HasOwnName(name string) bool {
	return len(name) > len(NamePrefix) && name[:len(NamePrefix)] == NamePrefix
}

// SameMap reports whether both are handles of one map.
func SameMap(a, b *ciliumebpf.Map) (bool, error) {
	infoA, err := a.Info()
	if err != nil {
		return false, fmt.Errorf("inspect map %s: %w", a, err)
	}
	infoB, err := b.Info()
	if err != nil {
		return false, fmt.Errorf("inspect map %s: %w", b, err)
	}
	idA, _ := infoA.ID()
	idB, _ := infoB.ID()
	return idA == idB, nil
}

// DeleteAll deletes all entries of a map of any layout.
func DeleteAll(m *ciliumebpf.Map) error {
	if m == nil {
		return nil
	}
	var keys [][]byte
	for last := any(nil); ; {
		key, err := m.NextKeyBytes(last)
		if err != nil {
			return fmt.Errorf("read the keys of %s: %w", m, err)
		}
		if key == nil {
			break
		}
		keys, last = append(keys, key), key
	}
	for _, key := range keys {
		if err := m.Delete(key); err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
			return fmt.Errorf("empty %s: %w", m, err)
		}
	}
	return nil
}

// OpenMapByID is ciliumebpf.NewMapFromID with flags. A read-only
// descriptor keeps a mistake from reaching the datapath.
func OpenMapByID(id ciliumebpf.MapID, flags uint32) (*ciliumebpf.Map, error) {
	// The head of union bpf_attr for BPF_MAP_GET_FD_BY_ID.
	attr := struct{ id, next, flags uint32 }{id: uint32(id), flags: flags}
	fd, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_MAP_GET_FD_BY_ID, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	runtime.KeepAlive(&attr)
	if errno != 0 {
		return nil, errno
	}
	return ciliumebpf.NewMapFromFD(int(fd))
}

// Reopen opens a map once more, with other flags.
func Reopen(m *ciliumebpf.Map, flags uint32) (*ciliumebpf.Map, error) {
	info, err := m.Info()
	if err != nil {
		return nil, fmt.Errorf("inspect %s: %w", m, err)
	}
	id, _ := info.ID()
	again, err := OpenMapByID(id, flags)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", m, err)
	}
	return again, nil
}
