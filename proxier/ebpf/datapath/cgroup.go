// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/rootlock"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
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

// aliveWithin is how old the sign of life of a process may be; it gives one each second.
const aliveWithin = 10 * time.Second

// Lock keeps two processes from writing the same maps. The lock is released when what Lock returns is closed,
// and by the kernel when the process ends.
//
// Every user who may open the cgroup directory can hold the lock on it. So there is a second one that only
// privileged processes can hold. With that, the one on the directory decides only between this
// process and one of an earlier version, which shows signs of life in its maps. Where the second one is
// not available, the first one decides.
func Lock(ctx context.Context, cgroup *os.File) (io.Closer, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(cgroup.Fd()), &st); err != nil {
		return nil, fmt.Errorf("inspect %s: %w", cgroup.Name(), err)
	}
	second, unavailable := lockNamespace(uint16(st.Ino))
	if errors.Is(unavailable, rootlock.ErrHeld) {
		return nil, fmt.Errorf("%w: %s", ErrBusy, cgroup.Name())
	}
	err := lockDirectory(cgroup)
	if errors.Is(err, ErrBusy) && unavailable == nil {
		if alive, checkErr := isServed(cgroup); alive || checkErr != nil {
			err = errors.Join(err, checkErr)
		} else {
			klog.FromContext(ctx).Info("A process that is no kube-proxy of Tandem holds the lock on the cgroup directory; going on without it", "cgroup", cgroup.Name())
			err = nil
		}
	}
	if err != nil {
		return nil, errors.Join(err, second.Close())
	}
	return second, nil
}

// lockNamespace takes the lock for privileged processes. A child that an earlier holder had just
// forked, and that runs no program yet, still has its socket for a moment.
func lockNamespace(number uint16) (l *rootlock.Lock, err error) {
	for deadline := time.Now().Add(time.Second); ; time.Sleep(5 * time.Millisecond) {
		l, err = rootlock.Acquire(number)
		if !errors.Is(err, rootlock.ErrHeld) || time.Now().After(deadline) {
			return l, err
		}
	}
}

func lockDirectory(cgroup *os.File) error {
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

// isServed reports whether a process has shown a sign of life in the maps of the programs on a cgroup.
func isServed(cgroup *os.File) (bool, error) {
	found, err := FindAttached(cgroup)
	if err != nil {
		return false, err
	}
	defer CloseAttached(found)
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return false, fmt.Errorf("read the clock: %w", err)
	}
	for _, a := range found {
		maps, err := lbmap.MapsOf(a.Program)
		if err != nil {
			return false, err
		}
		var s lbmap.Successor
		m := maps["tdm_successor"]
		if m != nil {
			err = m.Lookup(uint32(0), &s)
		}
		maps.Close()
		if err != nil {
			return false, fmt.Errorf("read tdm_successor: %w", err)
		}
		if m != nil && uint64(now.Nano()) < s.OwnerSeenNs+uint64(aliveWithin) {
			return true, nil
		}
	}
	return false, nil
}

// IsLocked reports whether a process holds the lock. The test takes a shared lock: it does not
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
