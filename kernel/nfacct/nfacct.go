// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package nfacct creates, reads and deletes the kernel's named packet counters, which rules
// reference by "-m nfacct".
package nfacct

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Kernel accesses the counters of the calling thread's network namespace. All methods need
// CAP_NET_ADMIN.
type Kernel struct{}

var (
	// ErrNotFound says that no counter has the name.
	ErrNotFound = errors.New("counter does not exist")
	// ErrInUse says that rules reference the counter.
	ErrInUse = errors.New("counter is in use by rules")
	// ErrNotSupported says that the kernel does not support counters.
	ErrNotSupported = errors.New("the kernel does not support packet counters (module nfnetlink_acct)")
)

// MaxNameLen is the longest name in bytes, without the terminating zero.
const MaxNameLen = 31

// enum nfnl_acct_msg_types and enum nfnl_acct_type of linux/netfilter/nfnetlink_acct.h.
const (
	messageNew    = 0
	messageGet    = 1
	messageDelete = 3

	attrName    = 1
	attrPackets = 2
)

// Ensure creates a counter, which starts at zero, unless one has the name.
func (Kernel) Ensure(name string) error {
	_, err := request(messageNew, unix.NLM_F_CREATE, name)
	if errors.Is(err, unix.EBUSY) { // it exists
		err = nil
	}
	return wrap("create", name, err)
}

// Packets returns the value of a counter.
func (Kernel) Packets(name string) (uint64, error) {
	messages, err := request(messageGet, 0, name)
	if err != nil {
		return 0, wrap("read", name, err)
	}
	for _, m := range messages {
		if n, ok := packetsOf(m); ok {
			return n, nil
		}
	}
	return 0, wrap("read", name, errors.New("the kernel's reply has no packet count"))
}

// Delete deletes a counter, if it exists. It fails with ErrInUse while rules reference it.
func (Kernel) Delete(name string) error {
	_, err := request(messageDelete, 0, name)
	if errors.Is(err, unix.ENOENT) {
		err = nil
	}
	return wrap("delete", name, err)
}

// request sends a request about one counter. Without a name it would concern all counters,
// foreign ones too.
func request(message int, flags int, name string) ([][]byte, error) {
	if name == "" || len(name) > MaxNameLen {
		return nil, fmt.Errorf("name must have 1 to %d bytes", MaxNameLen)
	}
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_ACCT<<8|message, flags|unix.NLM_F_ACK)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	req.AddData(nl.NewRtAttr(attrName, nl.ZeroTerminated(name)))
	return req.Execute(unix.NETLINK_NETFILTER, 0)
}

// packetsOf reads the number of packets from an answer.
func packetsOf(message []byte) (n uint64, ok bool) {
	if len(message) < nl.SizeofNfgenmsg {
		return 0, false
	}
	attrs, err := nl.ParseRouteAttrAsMap(message[nl.SizeofNfgenmsg:])
	if err != nil {
		return 0, false
	}
	value := attrs[attrPackets].Value
	if len(value) != 8 {
		return 0, false
	}
	return binary.BigEndian.Uint64(value), true
}

// wrap adds the step, and translates the kernel's errors.
func wrap(verb, name string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOENT):
		err = ErrNotFound
	case errors.Is(err, unix.EBUSY):
		err = ErrInUse
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP): // nfnetlink lacks the subsystem
		err = fmt.Errorf("%w: %w", ErrNotSupported, err)
	}
	return fmt.Errorf("%s counter %s: %w", verb, name, err)
}
