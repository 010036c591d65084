// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netlink

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

const (
	// burstTime is how long changes are collected before the next list: a device that
	// comes up also gets addresses and routes.
	burstTime = 20 * time.Millisecond
	// restFactor limits the share of time spent listing: after a list that took t,
	// changes are collected for restFactor*t. With a million routes, a list takes seconds.
	restFactor = 4
	// relistTime is the interval of lists without a notification.
	relistTime = time.Minute
	// reopenTime is the delay after the first failure.
	reopenTime = time.Second
)

// Follower lists something of rtnetlink, or of another protocol of netlink, again after each change. Notifications only trigger a
// list; their contents are not used. The netlink library's subscription would parse them, in a
// goroutine with a buffer of 64 KiB.
type Follower struct {
	// What is followed, for errors and the log.
	What string
	// Protocol of netlink; rtnetlink if 0.
	Protocol int
	// Groups of that protocol that notify of changes: a mask, of unix.RTMGRP_… for rtnetlink.
	Groups uint32
	// Run runs a function on a thread in the network namespace to follow.
	Run func(func() error) error
	// Wake counts as a change, too. It may be nil.
	Wake <-chan struct{}
	// List is called first, after changes, and once a minute. An error ends the
	// subscription, and a new one is opened later.
	List func() error
}

// Follow lists until ctx is done. It logs failures, and retries.
func (f *Follower) Follow(ctx context.Context) {
	for pause := reopenTime; ; pause = min(2*pause, relistTime) {
		err := f.follow(ctx)
		if ctx.Err() != nil {
			return
		}
		klog.FromContext(ctx).Error(err, "Cannot watch the kernel, retrying", "what", f.What, "after", pause)
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
		case <-timer.C:
		}
	}
}

// follow subscribes before it lists, so that it misses no change.
func (f *Follower) follow(ctx context.Context) error {
	socket, err := f.open()
	if err != nil {
		return fmt.Errorf("subscribe to %s: %w", f.What, err)
	}
	changed, lost := make(chan struct{}, 1), make(chan error, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		lost <- f.receive(socket, changed)
	}()
	defer func() { socket.Close(); <-done }()

	timer := time.NewTimer(0) // the first list
	defer timer.Stop()
	burst, rest := false, burstTime
	var listed time.Time
	change := func() {
		// The first change after a quiet period is handled immediately.
		if !burst {
			burst = true
			timer.Reset(rest - time.Since(listed))
		}
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-lost:
			return err
		case <-f.Wake:
			change()
		case <-changed:
			change()
		case <-timer.C:
			burst = false
			start := time.Now()
			if err := f.List(); err != nil {
				return err
			}
			listed = time.Now()
			rest = max(burstTime, restFactor*listed.Sub(start))
			timer.Reset(relistTime)
		}
	}
}

// open returns a socket that becomes readable when something changes.
func (f *Follower) open() (socket *os.File, err error) {
	err = f.Run(func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, f.Protocol) // NETLINK_ROUTE is 0
		if err != nil {
			return err
		}
		if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: f.Groups}); err != nil {
			unix.Close(fd)
			return err
		}
		socket = os.NewFile(uintptr(fd), "netlink")
		return nil
	})
	return socket, err
}

// receive signals changed for each message.
func (f *Follower) receive(socket *os.File, changed chan<- struct{}) error {
	var ignored [64]byte
	for {
		// An overflow loses messages, but the next list shows their changes.
		if _, err := socket.Read(ignored[:]); err != nil && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("receive changes of %s: %w", f.What, err)
		}
		select {
		case changed <- struct{}{}:
		default:
		}
	}
}
