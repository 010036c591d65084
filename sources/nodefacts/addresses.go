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

// ipvsDevice has the addresses of Services in mode ipvs. They are not addresses of the node.
const ipvsDevice = "kube-ipvs0"

const (
	// burstTime is how long changes are collected: a device that comes up gets several
	// addresses.
	burstTime = 20 * time.Millisecond
	// relistTime is the interval of lists without a notification.
	relistTime = time.Minute
	// reopenTime is the delay after the first failure.
	reopenTime = time.Second
)

// Addresses lists and watches the addresses of this node's devices.
type Addresses struct {
	// In runs a function on a thread in the network namespace to watch; nil means that
	// of the process.
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

// Watch calls tell with the addresses, first and whenever they may have changed, until ctx is
// done.
func (w *Addresses) Watch(ctx context.Context, tell func([]netip.Addr)) {
	for pause := reopenTime; ; pause = min(2*pause, relistTime) {
		err := w.watch(ctx, tell)
		if ctx.Err() != nil {
			return
		}
		klog.FromContext(ctx).Error(err, "Cannot watch the node's addresses, retrying", "after", pause)
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
		case <-timer.C:
		}
	}
}

// watch subscribes before it lists, so that it misses no change.
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

// open returns a socket that becomes readable when an address is added or deleted, also with its
// device. The contents of the messages are not used. The netlink library's subscription would
// parse them, in a goroutine with a buffer of 64 KiB.
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

// receive signals changed for each message.
func receive(events *os.File, changed chan<- struct{}) error {
	var ignored [64]byte
	for {
		// An overflow loses messages, but the next list shows their changes.
		if _, err := events.Read(ignored[:]); err != nil && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("receive changes of addresses: %w", err)
		}
		select {
		case changed <- struct{}{}:
		default:
		}
	}
}
