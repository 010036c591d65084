// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/lab"
)

func TestBulk(t *testing.T) {
	l := lab.NewT(t)
	p, q := l.Node("node1").Pod("p"), l.Node("node2").Pod("q")
	srv, err := q.ServeBulk(80)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range families(p.Sandbox, q.Sandbox) {
		to := port(a[1], 80)
		if err := p.Bulk(bg, to, lab.BulkSize); err != nil {
			t.Error(err)
		}
		// One connection can do several.
		c, err := p.Dial(bg, "tcp", to)
		if err != nil {
			t.Fatal(err)
		}
		for _, size := range []int{0, 1, 300_000} {
			if err := lab.BulkConn(bg, c, size); err != nil {
				t.Errorf("%d bytes: %v", size, err)
			}
		}
		c.Close()
	}
	if n := srv.Requests.Load(); n != 8 {
		t.Errorf("got %d transfers, want 8", n)
	}
}

// tampered is a connection that changes one byte.
type tampered struct {
	net.Conn
	written, read int // the byte to change, counted from 1
}

func (c *tampered) Write(b []byte) (int, error) {
	b = append([]byte(nil), b...)
	tamper(&c.written, b)
	return c.Conn.Write(b)
}

func (c *tampered) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	tamper(&c.read, b[:n])
	return n, err
}

func tamper(at *int, b []byte) {
	if *at > 0 && *at <= len(b) {
		b[*at-1] ^= 0xff
	}
	*at -= len(b)
}

func TestBulkTellsWhatDiffers(t *testing.T) {
	l := lab.NewT(t)
	p := l.Node("node1").Pod("p")
	if _, err := p.ServeBulk(80); err != nil {
		t.Fatal(err)
	}
	if _, err := p.ServeEcho(80); err != nil {
		t.Fatal(err)
	}
	const size = 100_000
	for _, tc := range []struct {
		name, network string
		written, read int
		want          string
	}{
		// The size goes first, in four bytes.
		{"to the server", "tcp", 4 + 70_001, 0, "at the server: from byte 70000 on received "},
		{"to the client", "tcp", 0, 50_001, "at the client: from byte 50000 on received "},
		{"datagram", "udp", 0, 2, "from byte 1 on received "},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := p.Dial(bg, tc.network, port(p.Addr4, 80))
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			altered := &tampered{Conn: c, written: tc.written, read: tc.read}
			if tc.network == "tcp" {
				err = lab.BulkConn(bg, altered, size)
			} else {
				err = lab.EchoConn(bg, altered, 1000)
			}
			if err == nil || !strings.HasPrefix(err.Error(), tc.want) {
				t.Errorf("got %v, want %s…", err, tc.want)
			}
		})
	}
	// The error of a transfer that stops says how much was transferred.
	ctx, cancel := context.WithTimeout(bg, 100*time.Millisecond)
	defer cancel()
	other, err := p.ServeTCP(81)
	if err != nil {
		t.Fatal(err)
	}
	err = p.Bulk(ctx, port(p.Addr4, other.Port), 1000)
	if !errors.Is(err, os.ErrDeadlineExceeded) || !strings.Contains(err.Error(), " of 1000 bytes: ") {
		t.Errorf("another server: got %v", err)
	}
}

func TestEcho(t *testing.T) {
	l := lab.NewT(t)
	p, n2 := l.Node("node1").Pod("p"), l.Node("node2")
	q := n2.Pod("q")
	if _, err := q.ServeEcho(53); err != nil {
		t.Fatal(err)
	}
	fragments := capture(t, n2.Sandbox, lab.Uplink, func(c lab.Captured) bool {
		_, ok := c.Fragment()
		return ok && !c.Outgoing
	})
	for _, a := range families(p.Sandbox, q.Sandbox) {
		for _, tc := range []struct{ size, fragments int }{{100, 0}, {2_000, 2}, {8_000, 6}, {60_000, 41}} {
			before := len(fragments.Packets())
			if err := p.Echo(bg, port(a[1], 53), tc.size); err != nil {
				t.Error(err)
			}
			eventually(t, "fragments", func() bool { return len(fragments.Packets()) >= before+tc.fragments })
			if got := len(fragments.Packets()) - before; got < tc.fragments || got > tc.fragments+1 {
				t.Errorf("%d bytes came in %d fragments, want %d", tc.size, got, tc.fragments)
			}
		}
		if err := p.Echo(bg, port(a[1], 54), 100); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("no server: got %v", err)
		}
	}
	ctx, cancel := context.WithTimeout(bg, 50*time.Millisecond)
	defer cancel()
	if err := p.Echo(ctx, netip.MustParseAddrPort("10.96.0.10:53"), 8_000); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("no answer: got %v", err)
	}
}
