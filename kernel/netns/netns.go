// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package netns runs code in a network namespace. In production that is the namespace of the
// host and of the process. In tests, one process serves several nodes with a namespace each.
package netns

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Namespace is an open network namespace. The zero value refers to none.
type Namespace struct{ file *os.File }

const ofThread = "/proc/thread-self/ns/net"

// Own opens the network namespace of the calling thread.
func Own() (Namespace, error) { return Open(ofThread) }

// Open opens the network namespace at a path, such as /proc/1234/ns/net.
func Open(path string) (Namespace, error) {
	f, err := os.Open(path)
	if err != nil {
		return Namespace{}, fmt.Errorf("open network namespace: %w", err)
	}
	return Namespace{f}, nil
}

// Do calls f on a thread in the namespace. Programs that f starts run in the namespace too.
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
	go n.enter(f, done)
	return <-done
}

// enter calls f in the namespace, on a thread that ends with this goroutine. That is never the
// main thread: it would not end, and /proc/<pid>/ns/net would show this namespace for good.
func (n Namespace) enter(f func() error, done chan<- error) {
	runtime.LockOSThread() // never unlocked, so the thread ends
	if unix.Gettid() == unix.Getpid() {
		defer runtime.UnlockOSThread()
		other := make(chan error)
		go n.enter(f, other) // on another thread, as this goroutine occupies the main thread
		done <- <-other
		return
	}
	if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
		done <- fmt.Errorf("enter network namespace %s: %w", n.file.Name(), err)
		return
	}
	done <- f()
}

// here reports whether the calling thread is in the namespace.
func (n Namespace) here() (bool, error) {
	var own, this unix.Stat_t
	if err := unix.Fstat(int(n.file.Fd()), &own); err != nil {
		return false, fmt.Errorf("inspect network namespace: %w", err)
	}
	if err := unix.Stat(ofThread, &this); err != nil {
		return false, fmt.Errorf("inspect network namespace of the thread: %w", err)
	}
	return own.Dev == this.Dev && own.Ino == this.Ino, nil
}

// Cookie returns the cookie that identifies the namespace in eBPF programs, or 0 before Linux 5.14,
// which has no such option.
func (n Namespace) Cookie() (cookie uint64, err error) {
	err = n.Do(func() error {
		cookie, err = Cookie()
		return err
	})
	return cookie, err
}

// Close closes the handle of the namespace.
func (n Namespace) Close() error {
	if n.file == nil {
		return nil
	}
	return n.file.Close()
}

// Cookie returns the cookie of the calling thread's network namespace; 0 before Linux 5.14.
func Cookie() (uint64, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	}
	if err != nil {
		return 0, fmt.Errorf("open socket for the network namespace's cookie: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if errors.Is(err, unix.ENOPROTOOPT) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the network namespace's cookie: %w", err)
	}
	return cookie, nil
}
