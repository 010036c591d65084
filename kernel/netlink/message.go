// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netlink

import (
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

// Message is a message from the kernel. Its body is valid until the next Receive.
type Message struct {
	Kind, Flags uint16
	Seq         uint32
	Body        []byte
}

// Errno returns the error at the beginning of NLMSG_ERROR and NLMSG_DONE.
func (m *Message) Errno() error {
	if len(m.Body) < 4 {
		return nil
	}
	if code := int32(binary.NativeEndian.Uint32(m.Body)); code < 0 {
		return unix.Errno(-code)
	}
	return nil
}

// Begin appends the header of a message. End fills in the length.
func Begin(b []byte, kind, flags uint16, seq uint32) []byte {
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, seq)
	return binary.NativeEndian.AppendUint32(b, 0)
}

// End fills in the length of the message that starts at the offset.
func End(b []byte, start int) []byte {
	binary.NativeEndian.PutUint32(b[start:], uint32(len(b)-start))
	return b
}

// Messages and attributes start at multiples of four (NLMSG_ALIGNTO, NLA_ALIGNTO).
func align(n int) int { return (n + 3) &^ 3 }

// Attr appends an attribute.
func Attr(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofNlAttr+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	return append(b, make([]byte, align(len(value))-len(value))...)
}

// Nest appends an attribute whose value fill appends.
func Nest(b []byte, kind uint16, fill func([]byte) []byte) []byte {
	start := len(b)
	b = fill(Attr(b, kind|unix.NLA_F_NESTED, nil))
	binary.NativeEndian.PutUint16(b[start:], uint16(len(b)-start))
	return b
}

// kindMask clears NLA_F_NESTED and NLA_F_NET_BYTEORDER.
const kindMask = 0x3fff

// EachAttr calls fn for each attribute, until one is malformed or fn returns an error.
func EachAttr(b []byte, fn func(kind uint16, value []byte) error) error {
	for len(b) >= unix.SizeofNlAttr {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.SizeofNlAttr || n > len(b) {
			return errors.New("parse attributes: malformed attribute")
		}
		if err := fn(binary.NativeEndian.Uint16(b[2:])&kindMask, b[unix.SizeofNlAttr:n]); err != nil {
			return err
		}
		b = b[min(len(b), align(n)):]
	}
	return nil
}
