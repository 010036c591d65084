// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// OpenCgroup opens a directory of a cgroup2 filesystem.
func OpenCgroup(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open cgroup root: %w", err)
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return nil, errors.Join(fmt.Errorf("find the type of %s: %w", path, err), f.Close())
	}
	if int64(st.Type) != unix.CGROUP2_SUPER_MAGIC {
		return nil, errors.Join(fmt.Errorf("%s is not in a cgroup2 filesystem", path), f.Close())
	}
	return f, nil
}

// ErrBusy says that another process serves this cgroup.
var ErrBusy = errors.New("another process serves this cgroup")

// Lock keeps two processes from writing the same maps. The kernel releases it when the
// process ends.
func Lock(cgroup *os.File) error {
	// An inspector that tests the lock holds it for a moment.
	for deadline := time.Now().Add(100 * time.Millisecond); ; time.Sleep(5 * time.Millisecond) {
		switch err := unix.Flock(int(cgroup.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK):
			return fmt.Errorf("lock %s: %w", cgroup.Name(), err)
		case time.Now().After(deadline):
			return fmt.Errorf("%w: %s", ErrBusy, cgroup.Name())
		}
	}
}

// IsLocked says whether a process holds the lock. The test takes a shared lock: it does not
// disturb other inspectors, and a starting process only between two system calls.
func IsLocked(cgroup *os.File) (bool, error) {
	fd := int(cgroup.Fd())
	err := unix.Flock(fd, unix.LOCK_SH|unix.LOCK_NB)
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("try the lock of %s: %w", cgroup.Name(), err)
	}
	if err := unix.Flock(fd, unix.LOCK_UN); err != nil {
		return false, fmt.Errorf("unlock %s: %w", cgroup.Name(), err)
	}
	return false, nil
}
