// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package backendstates keeps what operators say of backends of this node in a file. Commands write it, and the
// running process follows it; so it outlives both.
package backendstates

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
)

// FileName is the file's, in the state directory.
const FileName = "backends.json"

const (
	lockName = "backends.lock"
	// maxSize and MaxEntries bound what a process reads.
	maxSize    = 1 << 20
	MaxEntries = 1024
)

// Entry is what an operator says of a backend.
type Entry struct {
	Address netip.Addr `json:"address"`
	// Port is 0 for all ports.
	Port uint16 `json:"port,omitempty"`
	// Service is namespace/name; empty for all Services.
	Service string               `json:"service,omitempty"`
	State   proxier.BackendState `json:"state"`
	Since   time.Time            `json:"since,omitzero"`
	// Until is when it ends by itself; zero for never.
	Until time.Time `json:"until,omitzero"`
}

// Backend is the address, with the port if there is one.
func (e *Entry) Backend() string {
	if e.Port == 0 {
		return e.Address.String()
	}
	return netip.AddrPortFrom(e.Address, e.Port).String()
}

// Same reports whether both are about the same backends.
func (e *Entry) Same(o *Entry) bool {
	return e.Address == o.Address && e.Port == o.Port && e.Service == o.Service
}

// Override is the entry as decisions need it.
func (e *Entry) Override() proxier.BackendOverride {
	o := proxier.BackendOverride{Addr: e.Address, Port: e.Port, State: e.State, Until: e.Until}
	if e.Service != "" {
		o.Service, _ = proxier.ParseServiceName(e.Service) // valid
	}
	return o
}

// Overrides are the entries as facts have them.
func Overrides(list []Entry) (all []proxier.BackendOverride) {
	for i := range list {
		all = append(all, list[i].Override())
	}
	slices.SortFunc(all, func(a, b proxier.BackendOverride) int { return a.Compare(&b) })
	return all
}

type file struct {
	Backends []Entry `json:"backends"`
}

// Load reads the entries of a directory that have not ended, sorted; none if there is no file. It refuses a file that others than
// root or this user can write.
func Load(dir string, now time.Time) ([]Entry, error) {
	path := filepath.Join(dir, FileName)
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := trusted(f); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxSize {
		return nil, fmt.Errorf("%s has more than %d bytes", path, maxSize)
	}
	var read file
	if err := json.Unmarshal(text, &read); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(read.Backends) > MaxEntries {
		return nil, fmt.Errorf("%s has %d backends; the limit is %d", path, len(read.Backends), MaxEntries)
	}
	list := read.Backends[:0]
	for i := range read.Backends {
		e := &read.Backends[i]
		if err := e.validate(); err != nil {
			return nil, fmt.Errorf("%s: backends[%d]: %w", path, i, err)
		}
		if e.Until.IsZero() || e.Until.After(now) {
			list = append(list, *e)
		}
	}
	slices.SortFunc(list, compare)
	return list, nil
}

func compare(a, b Entry) int {
	return cmp.Or(a.Address.Compare(b.Address), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Service, b.Service))
}

func trusted(f *os.File) error {
	var stat unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &stat); err != nil {
		return err
	}
	switch {
	case stat.Mode&unix.S_IFMT != unix.S_IFREG:
		return errors.New("not a regular file")
	case stat.Uid != 0 && int(stat.Uid) != os.Geteuid() || stat.Mode&0o022 != 0:
		return errors.New("users other than root can write it; ignored")
	}
	return nil
}

func (e *Entry) validate() error {
	switch {
	case !e.Address.IsValid():
		return errors.New("address: there is none")
	case e.Address.Zone() != "" || e.Address.Is4In6() || e.Address.IsUnspecified():
		return fmt.Errorf("address: %s is no backend's", e.Address)
	case e.State == proxier.ActiveState:
		return errors.New("state: there is none")
	case e.Service != "":
		_, err := proxier.ParseServiceName(e.Service)
		return err
	}
	return nil
}

// Set adds an entry, or replaces the one about the same backends.
func Set(dir string, e Entry, now time.Time) error {
	if err := e.validate(); err != nil {
		return err
	}
	return change(dir, now, func(list []Entry) ([]Entry, error) {
		list = append(slices.DeleteFunc(list, func(o Entry) bool { return o.Same(&e) }), e)
		if len(list) > MaxEntries {
			return nil, fmt.Errorf("%d backends have a state already, which is the limit; restore some", MaxEntries)
		}
		return list, nil
	})
}

// Remove removes the entry about these backends, and reports whether there was one.
func Remove(dir string, e Entry, now time.Time) (found bool, err error) {
	err = change(dir, now, func(list []Entry) ([]Entry, error) {
		n := len(list)
		list = slices.DeleteFunc(list, func(o Entry) bool { return o.Same(&e) })
		found = len(list) < n
		return list, nil
	})
	return found, err
}

// change writes the file anew, at once for whoever reads it. Only one process does at a time.
func change(dir string, now time.Time, edit func([]Entry) ([]Entry, error)) (err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	list, err := Load(dir, now)
	if err != nil {
		return err
	}
	if list, err = edit(list); err != nil {
		return err
	}
	slices.SortFunc(list, compare)
	text, err := json.MarshalIndent(file{append([]Entry{}, list...)}, "", "  ")
	if err != nil {
		return err
	}
	temporary, err := os.CreateTemp(dir, "."+FileName+"-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, removeIfThere(temporary.Name())) }()
	_, err = temporary.Write(append(text, '\n'))
	err = errors.Join(err, temporary.Chmod(0o644), temporary.Sync(), temporary.Close())
	if err != nil {
		return err
	}
	return os.Rename(temporary.Name(), filepath.Join(dir, FileName))
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
