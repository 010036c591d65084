// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"time"
)

// Both ends compare what they receive with the expected bytes, not just checksums, so that
// errors name the first byte that differs.

// BulkSize is enough for windows to open and for super-packets to arise.
const BulkSize = 4 << 20

// bulkTimeout applies to contexts without a deadline.
var bulkTimeout = 10 * time.Second * Slower()

// bulkWrite is how much is written at once. The kernel builds super-packets of up to
// 64 KiB from it, and segments them as late as possible.
const bulkWrite = 256 << 10

// direction tells the stream from client to server from the one back.
type direction byte

const (
	toServer direction = iota
	toClient
)

// stream is the endless sequence of bytes of one direction.
func (d direction) stream() io.Reader { return rand.NewChaCha8([32]byte{byte(d)}) }

// ServeBulk starts a TCP server for Bulk, like ServeTCP.
func (s *Sandbox) ServeBulk(port uint16) (*Server, error) {
	return s.serveStreams("tcp", port, (*Server).bulk)
}

// bulk reads the size of a transfer, performs it, and sends its result.
func (s *Server) bulk(c net.Conn) {
	for {
		var size uint32
		if err := binary.Read(c, binary.BigEndian, &size); err != nil {
			return
		}
		s.Requests.Add(1)
		verdict := ""
		if err := exchange(c, int(size), toClient, toServer); err != nil {
			verdict = strings.ReplaceAll(err.Error(), "\n", "; ")
		}
		if _, err := c.Write([]byte(verdict + "\n")); err != nil {
			return
		}
	}
}

// Bulk sends the given number of bytes to a server started by ServeBulk, which sends as many
// back at the same time. Errors name the direction and the byte that is wrong or
// missing. Without a deadline in ctx it times out after ten seconds.
func (s *Sandbox) Bulk(ctx context.Context, to netip.AddrPort, size int) error {
	ctx, cancel := withDeadline(ctx, bulkTimeout)
	defer cancel()
	c, err := s.Dial(ctx, "tcp", to)
	if err != nil {
		return err
	}
	defer c.Close()
	return wrap(BulkConn(ctx, c, size), "bulk transfer from %s to %s", s.Name, to)
}

// BulkConn makes one more transfer over a connection.
func BulkConn(ctx context.Context, c net.Conn, size int) error {
	if err := setDeadline(ctx, c, bulkTimeout); err != nil {
		return err
	}
	if err := binary.Write(c, binary.BigEndian, uint32(size)); err != nil {
		return err
	}
	if err := exchange(c, size, toServer, toClient); err != nil {
		return fmt.Errorf("at the client: %w", err)
	}
	verdict, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return fmt.Errorf("wait for the server's result: %w", err)
	}
	if verdict = strings.TrimSuffix(verdict, "\n"); verdict != "" {
		return fmt.Errorf("at the server: %s", verdict)
	}
	return nil
}

// exchange sends in one direction and receives from the other.
func exchange(c net.Conn, size int, out, in direction) error {
	sent := make(chan error, 1)
	go func() { sent <- out.send(c, size) }()
	err := in.receive(c, size)
	return errors.Join(err, <-sent)
}

func (d direction) send(c net.Conn, size int) error {
	stream, buf := d.stream(), make([]byte, bulkWrite)
	for done := 0; done < size; {
		buf := buf[:min(len(buf), size-done)]
		_, _ = io.ReadFull(stream, buf)
		n, err := c.Write(buf)
		done += n
		if err != nil {
			return fmt.Errorf("sent %d of %d bytes: %w", done, size, err)
		}
	}
	return nil
}

// receive reads all of a stream even if it is wrong, so that the sender finishes.
func (d direction) receive(c net.Conn, size int) (differs error) {
	stream, buf, want := d.stream(), make([]byte, bulkWrite), make([]byte, bulkWrite)
	for done := 0; done < size; {
		n, err := c.Read(buf[:min(len(buf), size-done)])
		_, _ = io.ReadFull(stream, want[:n])
		if differs == nil {
			differs = compare(buf[:n], want[:n], done)
		}
		done += n
		if err != nil {
			return errors.Join(differs, fmt.Errorf("received %d of %d bytes: %w", done, size, err))
		}
	}
	return differs
}

// compare reports the first byte that differs; the data begins at an offset.
func compare(got, want []byte, offset int) error {
	if bytes.Equal(got, want) {
		return nil
	}
	if len(got) != len(want) {
		return fmt.Errorf("received %d bytes, want %d", len(got), len(want))
	}
	i := 0
	for got[i] == want[i] {
		i++
	}
	end := min(i+8, len(got))
	return fmt.Errorf("from byte %d on received %x…, want %x…", offset+i, got[i:end], want[i:end])
}

// ServeEcho starts a UDP server for Echo, like ServeUDP. It returns each datagram with all bits
// inverted, so that it does not answer an answer.
func (s *Sandbox) ServeEcho(port uint16) (*Server, error) {
	var first [1]byte
	_, _ = io.ReadFull(toServer.stream(), first[:])
	return s.serveUDP(port, func(_ *Server, _ netip.AddrPort, datagram []byte) []byte {
		if len(datagram) > 0 && datagram[0] == ^first[0] {
			return nil
		}
		invert(datagram)
		return datagram
	})
}

func invert(b []byte) {
	for i := range b {
		b[i] = ^b[i]
	}
}

// Echo sends one datagram of the given size to a server started by ServeEcho, and compares
// the reply. Sizes beyond the MTU need fragmentation. Without a deadline in ctx it
// times out after two seconds.
func (s *Sandbox) Echo(ctx context.Context, to netip.AddrPort, size int) error {
	ctx, cancel := withDeadline(ctx, dialTimeout)
	defer cancel()
	c, err := s.Dial(ctx, "udp", to)
	if err != nil {
		return err
	}
	defer c.Close()
	return wrap(EchoConn(ctx, c, size), "echo of %d bytes from %s to %s", size, s.Name, to)
}

// EchoConn sends one more datagram over a socket.
func EchoConn(ctx context.Context, c net.Conn, size int) error {
	if err := setDeadline(ctx, c, dialTimeout); err != nil {
		return err
	}
	want, got := make([]byte, size), make([]byte, 64<<10)
	_, _ = io.ReadFull(toServer.stream(), want)
	if _, err := c.Write(want); err != nil {
		return err
	}
	n, err := c.Read(got)
	if err != nil {
		return err
	}
	invert(want)
	return compare(got[:n], want, 0)
}
