// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// CookieOf is the number by which programs know a network namespace, given
// by a path such as /proc/<pid>/ns/net. It needs CAP_SYS_ADMIN.
func CookieOf(path string) (uint64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, fmt.Errorf("open network namespace: %w", err)
	}
	defer f.Close()
	var cookie uint64
	done := make(chan error)
	go func() { done <- inNamespace(f, func() (err error) { cookie, err = Cookie(); return err }) }()
	if err := <-done; err != nil {
		return 0, err
	}
	if cookie == 0 {
		return 0, fmt.Errorf("read the cookie of %s: %w before Linux 5.14", path, errors.ErrUnsupported)
	}
	return cookie, nil
}

// inNamespace runs fn in a network namespace, on a thread that nobody else uses
// until it is back.
func inNamespace(ns *os.File, fn func() error) error {
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open own network namespace: %w", err)
	}
	defer home.Close()
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter network namespace %s: %w", ns.Name(), err)
	}
	err = fn()
	if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
		// Still locked: the thread ends with this goroutine.
		return errors.Join(err, fmt.Errorf("leave network namespace %s: %w", ns.Name(), back))
	}
	runtime.UnlockOSThread()
	return err
}

// Cookie is the number by which the kernel and eBPF programs know the network namespace of the calling thread
// (Linux 5.14; before that, the host cannot be told from a pod at its socket).
func Cookie() (uint64, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	}
	if err != nil {
		return 0, fmt.Errorf("open a socket to learn the namespace's cookie: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if errors.Is(err, unix.ENOPROTOOPT) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the namespace's cookie: %w", err)
	}
	return cookie, nil
}
