// SPDX-License-Identifier: Apache-2.0

//go:build linux

package crr

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// cpu is the CPU that everything measured runs on.
type cpu struct {
	number int
	// softirqs is the schedstat of the kernel's thread for softirqs that are
	// too many to be run at once.
	softirqs string
}

// openCPU takes the last CPU this process may use: the first one has most of the
// interrupts.
func openCPU() (*cpu, error) {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return nil, os.NewSyscallError("sched_getaffinity", err)
	}
	c := &cpu{}
	for i, left := 0, allowed.Count(); left > 0; i++ {
		if allowed.IsSet(i) {
			c.number = i
			left--
		}
	}
	want := fmt.Sprintf("ksoftirqd/%d\n", c.number)
	names, err := filepath.Glob("/proc/[0-9]*/comm")
	if err != nil {
		return nil, err
	}
	for _, path := range names {
		// The process may have ended in the meantime.
		if name, _ := os.ReadFile(path); string(name) == want {
			c.softirqs = filepath.Join(filepath.Dir(path), "schedstat")
			return c, nil
		}
	}
	return nil, fmt.Errorf("measure softirqs: ksoftirqd/%d is not in /proc, as in a pid namespace: %w", c.number, fs.ErrNotExist)
}

// pin keeps the calling thread on the CPU until unpin is called.
func (c *cpu) pin() (unpin func(), err error) {
	var before, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return nil, os.NewSyscallError("sched_getaffinity", err)
	}
	one.Set(c.number)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return nil, os.NewSyscallError("sched_setaffinity", err)
	}
	return func() { _ = unix.SchedSetaffinity(0, &before) }, nil
}

// used is the CPU time of those threads of this process, and of softirqs.
func (c *cpu) used(threads ...int) (sum time.Duration, err error) {
	for _, tid := range threads {
		t, err := threadTime(tid)
		if err != nil {
			return 0, err
		}
		sum += t
	}
	stat, err := os.ReadFile(c.softirqs)
	if err != nil {
		return 0, err
	}
	ran, _, _ := bytes.Cut(stat, []byte(" "))
	ns, err := strconv.ParseInt(string(ran), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", c.softirqs, err)
	}
	return sum + time.Duration(ns), nil
}

// threadTime returns the CPU time of a thread of this process in nanoseconds. Other sources
// have the resolution of ticks.
func threadTime(tid int) (time.Duration, error) {
	// The clock of any thread, as pthread_getcpuclockid makes it: CPUCLOCK_SCHED
	// and CPUCLOCK_PERTHREAD_MASK below the inverted id.
	const sched, perThread = 2, 4
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^tid<<3|sched|perThread), &ts); err != nil {
		return 0, fmt.Errorf("read CPU time of thread %d: %w", tid, err)
	}
	return time.Duration(ts.Nano()), nil
}
