// SPDX-License-Identifier: Apache-2.0

package nodefacts

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// ipvsDevice holds the addresses of Services while kube-proxy is in mode ipvs:
// they are not this node's.
const ipvsDevice = "kube-ipvs0"

const (
	// burstTime is how long changes are collected: a device that comes up gets
	// several addresses.
	burstTime = 20 * time.Millisecond
	// relistTime is for what nobody told.
	relistTime = time.Minute
	// reopenTime is how long to wait after the first failure.
	reopenTime = time.Second
)

// Addresses are those of this node's devices.
type Addresses struct {
	// In runs a function on a thread that is in the network namespace to look
	// at; nil for the one of the process.
	In func(func() error) error
}

func (w *Addresses) in(fn func() error) error {
	if w.In != nil {
		return w.In(fn)
	}
	return fn()
}

// List returns the addresses, sorted, each once.
func (w *Addresses) List() (list []netip.Addr, err error) {
	err = w.in(func() error {
		ipvs := 0
		if link, err := netlink.LinkByName(ipvsDevice); err == nil {
			ipvs = link.Attrs().Index
		} else if _, none := errors.AsType[netlink.LinkNotFoundError](err); !none {
			return err
		}
		found, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		if err != nil {
			return err
		}
		for _, a := range found {
			if ip, ok := netip.AddrFromSlice(a.IP); ok && a.LinkIndex != ipvs {
				list = append(list, ip.Unmap())
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list), nil
}

// Watch tells the addresses, at first and whenever they may have changed, until
// ctx is done.
func (w *Addresses) Watch(ctx context.Context, tell func([]netip.Addr)) {
	for pause := reopenTime; ; pause = min(2*pause, relistTime) {
		err := w.watch(ctx, tell)
		if ctx.Err() != nil {
			return
		}
		klog.FromContext(ctx).Error(err, "Cannot follow the addresses of this node; trying again", "after", pause)
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
		case <-timer.C:
		}
	}
}

// watch lists after it listens, so that nothing is missed.
func (w *Addresses) watch(ctx context.Context, tell func([]netip.Addr)) error {
	events, err := w.open()
	if err != nil {
		return err
	}
	changed, lost := make(chan struct{}, 1), make(chan error, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		lost <- receive(events, changed)
	}()
	defer func() { events.Close(); <-done }()

	timer := time.NewTimer(0) // the first list
	defer timer.Stop()
	burst := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-lost:
			return err
		case <-changed:
			if !burst {
				burst = true
				timer.Reset(burstTime)
			}
		case <-timer.C:
			burst = false
			list, err := w.List()
			if err != nil {
				return err
			}
			tell(list)
			timer.Reset(relistTime)
		}
	}
}

// open makes a socket that becomes readable when an address comes or goes, which
// includes those of a device that goes. What it says does not matter:
// the netlink library's own subscription would parse it, in a goroutine with a
// buffer of 64 KiB.
func (w *Addresses) open() (events *os.File, err error) {
	err = w.in(func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR}); err != nil {
			unix.Close(fd)
			return err
		}
		events = os.NewFile(uintptr(fd), "rtnetlink")
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("subscribe to addresses: %w", err)
	}
	return events, nil
}

// receive turns messages into one that something changed.
func receive(events *os.File, changed chan<- struct{}) error {
	var ignored [64]byte
	for {
		// An overflow loses messages, and the list tells what they said.
		if _, err := events.Read(ignored[:]); err != nil && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("receive changes of addresses: %w", err)
		}
		select {
		case changed <- struct{}{}:
		default:
		}
	}
}
