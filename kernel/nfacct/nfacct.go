// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package nfacct makes, reads and deletes the kernel's named counters of packets, which rules
// name by "-m nfacct".
package nfacct

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Kernel has the counters of the calling thread's network namespace. All of it needs
// CAP_NET_ADMIN.
type Kernel struct{}

var (
	// ErrNotFound says that there is no counter of the name.
	ErrNotFound = errors.New("there is no such counter")
	// ErrInUse says that rules name the counter.
	ErrInUse = errors.New("rules name the counter")
	// ErrNotSupported says that the kernel has no counters.
	ErrNotSupported = errors.New("the kernel has no counters for rules (module nfnetlink_acct)")
)

// MaxNameLen is the longest name in bytes; the kernel has one more, for the end.
const MaxNameLen = 31

// enum nfnl_acct_msg_types and enum nfnl_acct_type of linux/netfilter/nfnetlink_acct.h.
const (
	messageNew    = 0
	messageGet    = 1
	messageDelete = 3

	attrName    = 1
	attrPackets = 2
)

// Ensure makes a counter, which begins with zero, unless there is one of the name.
func (Kernel) Ensure(name string) error {
	_, err := request(messageNew, unix.NLM_F_CREATE, name)
	if errors.Is(err, unix.EBUSY) { // which it says of one that is there
		err = nil
	}
	return told("make", name, err)
}

// Packets are those that a counter has counted.
func (Kernel) Packets(name string) (uint64, error) {
	messages, err := request(messageGet, 0, name)
	if err != nil {
		return 0, told("read", name, err)
	}
	for _, m := range messages {
		if n, ok := packetsOf(m); ok {
			return n, nil
		}
	}
	return 0, told("read", name, errors.New("the answer has no number of packets"))
}

// Delete deletes a counter, if there is one of the name. It fails with ErrInUse while rules
// name it.
func (Kernel) Delete(name string) error {
	_, err := request(messageDelete, 0, name)
	if errors.Is(err, unix.ENOENT) {
		err = nil
	}
	return told("delete", name, err)
}

// request asks for something about one counter. Without a name it would be about all, of others
// as well.
func request(message int, flags int, name string) ([][]byte, error) {
	if name == "" || len(name) > MaxNameLen {
		return nil, fmt.Errorf("its name does not have 1 to %d bytes", MaxNameLen)
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

// told says what was tried, and means what the kernel says.
func told(verb, name string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOENT):
		err = ErrNotFound
	case errors.Is(err, unix.EBUSY):
		err = ErrInUse
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP): // there is no such part of nfnetlink
		err = fmt.Errorf("%w: %w", ErrNotSupported, err)
	}
	return fmt.Errorf("%s counter %s: %w", verb, name, err)
}
