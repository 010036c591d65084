// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netlink

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// message appends a message with attributes of these values. Attribute i has kind 1+i.
func message(b []byte, kind uint16, seq uint32, values ...string) []byte {
	start := len(b)
	b = Begin(b, kind, unix.NLM_F_MULTI, seq)
	for i, v := range values {
		b = Attr(b, uint16(1+i)|unix.NLA_F_NET_BYTEORDER, []byte(v))
	}
	return End(b, start)
}

// describe returns the received messages, one word for each.
func describe(b []byte, most int) (words []string, err error) {
	_, err = each(b, func(m Message) (bool, error) {
		word := fmt.Sprintf("%d/%d", m.Kind, m.Seq)
		err := EachAttr(m.Body, func(kind uint16, value []byte) error {
			word += fmt.Sprintf(":%d=%s", kind, value)
			return nil
		})
		words = append(words, word)
		return len(words) == most, err
	})
	return words, err
}

func TestMessages(t *testing.T) {
	b := message(nil, 20, 1, "", "a", "abcd", "abcde")
	b = message(b, 21, 2)
	start := len(b)
	b = Begin(b, 22, 0, 3)
	b = Nest(b, 7, func(b []byte) []byte { return Attr(b, 8, []byte("abc")) })
	b = End(b, start)
	if len(b)%4 != 0 {
		t.Errorf("%d bytes", len(b))
	}
	nested := "22/3:7=" + string(Attr(nil, 8, []byte("abc")))
	for _, tc := range []struct {
		name string
		b    []byte
		most int
		want []string
		err  string
	}{
		{"all", b, 0, []string{"20/1:1=:2=a:3=abcd:4=abcde", "21/2", nested}, ""},
		{"the first", b, 1, []string{"20/1:1=:2=a:3=abcd:4=abcde"}, ""},
		{"half a header", b[:start+8], 0, []string{"20/1:1=:2=a:3=abcd:4=abcde", "21/2"}, ""},
		{"half a message", b[:len(b)-4], 0, []string{"20/1:1=:2=a:3=abcd:4=abcde", "21/2"}, "malformed message"},
		{"no length", make([]byte, 20), 0, nil, "malformed message"},
		{"an attribute beyond the end", End(append(Begin(nil, 20, 0, 1), 5, 0, 1, 0), 0), 0, []string{"20/1"}, "malformed attribute"},
		{"an attribute of no length", End(append(Begin(nil, 20, 0, 1), 0, 0, 1, 0), 0), 0, []string{"20/1"}, "malformed attribute"},
	} {
		got, err := describe(tc.b, tc.most)
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
		if (err != nil) != (tc.err != "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%s: error %v, want %q", tc.name, err, tc.err)
		}
	}
}

func TestErrno(t *testing.T) {
	for code, want := range map[int32]error{0: nil, -int32(unix.ENOENT): unix.ENOENT, 7: nil} {
		m := Message{Body: binary.NativeEndian.AppendUint32(nil, uint32(code))}
		if err := m.Errno(); !errors.Is(err, want) {
			t.Errorf("%d: %v, want %v", code, err, want)
		}
	}
	if err := (&Message{Body: []byte{1}}).Errno(); err != nil {
		t.Errorf("body of one byte: %v", err)
	}
}

// TestConn: Receive returns a dump to its end, and the kernel's error for an unknown request. It
// stops when its context ends.
func TestConn(t *testing.T) {
	c, err := Open(unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ask := func(ctx context.Context, kind, flags uint16) (links int, err error) {
		if err := c.Send(End(append(Begin(nil, kind, unix.NLM_F_REQUEST|flags, 9), make([]byte, unix.SizeofIfInfomsg)...), 0)); err != nil {
			t.Fatal(err)
		}
		err = c.Receive(ctx, func(m Message) (bool, error) {
			if m.Seq != 9 {
				t.Errorf("an answer to request %d", m.Seq)
			}
			if m.Kind == unix.RTM_NEWLINK {
				links++
				return false, nil
			}
			return true, m.Errno()
		})
		return links, err
	}
	if links, err := ask(t.Context(), unix.RTM_GETLINK, unix.NLM_F_DUMP); links == 0 || err != nil {
		t.Errorf("%d links, error %v", links, err)
	}
	if _, err := ask(t.Context(), 9999, unix.NLM_F_ACK); !errors.Is(err, unix.EOPNOTSUPP) {
		t.Errorf("error %v for an unknown request", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := ask(ctx, unix.RTM_GETLINK, unix.NLM_F_DUMP); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want context.Canceled", err)
	}
}
