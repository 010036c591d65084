// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// netns is the network namespace that the tier was opened in: the host's, and
// that of the process, but in tests, where one process has several nodes.
type netns struct{ file *os.File }

const threadNetNS = "/proc/thread-self/ns/net"

func ownNetNS() (netns, error) {
	f, err := os.Open(threadNetNS)
	if err != nil {
		return netns{}, fmt.Errorf("open the network namespace: %w", err)
	}
	return netns{f}, nil
}

// do calls f on a thread in the namespace.
func (n netns) do(f func() error) error {
	runtime.LockOSThread()
	here, err := n.here()
	if here {
		defer runtime.UnlockOSThread()
		return f()
	}
	runtime.UnlockOSThread()
	if err != nil {
		return err
	}
	done := make(chan error)
	go func() {
		// Never unlocked: the thread ends with the goroutine.
		runtime.LockOSThread()
		if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter the network namespace: %w", err)
			return
		}
		done <- f()
	}()
	return <-done
}

// here says whether the calling thread is in the namespace.
func (n netns) here() (bool, error) {
	var own, this unix.Stat_t
	if err := unix.Fstat(int(n.file.Fd()), &own); err != nil {
		return false, fmt.Errorf("inspect the network namespace: %w", err)
	}
	if err := unix.Stat(threadNetNS, &this); err != nil {
		return false, fmt.Errorf("inspect the thread's network namespace: %w", err)
	}
	return own.Dev == this.Dev && own.Ino == this.Ino, nil
}

func (n netns) close() error {
	if n.file == nil {
		return nil
	}
	return n.file.Close()
}
