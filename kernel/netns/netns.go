// SPDX-License-Identifier: Apache-2.0

// Package netns runs code in the network namespace that something was begun in: the
// host's, and that of the process, but in tests, where one process has several nodes.
package netns

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Namespace is a network namespace. The zero value is none.
type Namespace struct{ file *os.File }

const ofThread = "/proc/thread-self/ns/net"

// Own is that of the calling thread.
func Own() (Namespace, error) {
	f, err := os.Open(ofThread)
	if err != nil {
		return Namespace{}, fmt.Errorf("open the network namespace: %w", err)
	}
	return Namespace{f}, nil
}

// Do calls f on a thread in the namespace; programs that f starts are in it too.
func (n Namespace) Do(f func() error) error {
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
func (n Namespace) here() (bool, error) {
	var own, this unix.Stat_t
	if err := unix.Fstat(int(n.file.Fd()), &own); err != nil {
		return false, fmt.Errorf("inspect the network namespace: %w", err)
	}
	if err := unix.Stat(ofThread, &this); err != nil {
		return false, fmt.Errorf("inspect the thread's network namespace: %w", err)
	}
	return own.Dev == this.Dev && own.Ino == this.Ino, nil
}

// Close lets go of the namespace.
func (n Namespace) Close() error {
	if n.file == nil {
		return nil
	}
	return n.file.Close()
}
