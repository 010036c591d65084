// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Server answers requests with its name and the address of its peer:
//
//	<sandbox name> <peer address:port>\n
//
// once per line on TCP and SCTP, where connections stay open, and once per datagram on UDP.
type Server struct {
	Name string
	Port uint16

	// Conns counts accepted connections, Requests the requests answered.
	Conns, Requests atomic.Int64

	sandbox *Sandbox // nil in a helper process, which just ends
	closing func() error
	running sync.WaitGroup
	udp     *net.UDPConn // nil for streams

	mu    sync.Mutex
	conns map[net.Conn]struct{} // nil once closed
}

// ServeTCP starts a TCP server in the sandbox, on all addresses of both families.
// Port 0 takes a free one. The server ends with the sandbox at the latest.
func (s *Sandbox) ServeTCP(port uint16) (*Server, error) {
	return s.serveStreams("tcp", port, (*Server).talk)
}

// ServeSCTP starts an SCTP server like ServeTCP; see SCTPAvailable.
func (s *Sandbox) ServeSCTP(port uint16) (*Server, error) {
	return s.serveStreams("sctp", port, (*Server).talk)
}

// ServeUDP starts a UDP server like ServeTCP. Replies have the destination address of the
// request as their source, even on nodes, which have several addresses. What is an answer itself is
// not answered: where one is translated to another server, they would talk for ever.
func (s *Sandbox) ServeUDP(port uint16) (*Server, error) {
	return s.serveUDP(port, func(srv *Server, peer netip.AddrPort, request []byte) []byte {
		if _, err := ParseReply(string(request)); err == nil {
			return nil
		}
		return srv.answer(peer)
	})
}

// serveStreams starts a server that handles each connection by a function.
func (s *Sandbox) serveStreams(network string, port uint16, handle func(*Server, net.Conn)) (*Server, error) {
	l, err := s.listen(network, port)
	if err != nil {
		return nil, err
	}
	srv := &Server{Name: s.Name, sandbox: s, Port: uint16(l.Addr().(*net.TCPAddr).Port)}
	srv.accept(l, handle)
	return srv, s.keep(srv)
}

// serveUDP starts a server that answers each datagram with what a function returns, if it is not nil.
func (s *Sandbox) serveUDP(port uint16, answer func(*Server, netip.AddrPort, []byte) []byte) (*Server, error) {
	c, err := s.listenUDP(port)
	if err != nil {
		return nil, err
	}
	srv := &Server{Name: s.Name, sandbox: s, Port: uint16(c.LocalAddr().(*net.UDPAddr).Port)}
	srv.receive(c, answer)
	return srv, s.keep(srv)
}

// Close stops the server and its connections; it is idempotent.
func (s *Server) Close() error {
	if s.sandbox != nil {
		s.sandbox.forget(s)
	}
	err := s.closing()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	s.mu.Lock()
	for c := range s.conns {
		_ = c.Close()
	}
	s.conns = nil
	s.mu.Unlock()
	s.running.Wait()
	return err
}

func (s *Server) accept(l net.Listener, handle func(*Server, net.Conn)) {
	s.closing = l.Close
	s.conns = map[net.Conn]struct{}{}
	s.running.Go(func() {
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue // the client closed the connection before it was accepted
			}
			if s.add(c) {
				s.Conns.Add(1)
				s.running.Go(func() {
					handle(s, c)
					s.drop(c)
				})
			}
		}
	})
}

func (s *Server) add(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns == nil {
		_ = c.Close()
		return false
	}
	s.conns[c] = struct{}{}
	return true
}

func (s *Server) drop(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.CloseWrite() // see HangUp
	}
	_ = c.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

func (s *Server) talk(c net.Conn) {
	answer := s.answer(c.RemoteAddr().(*net.TCPAddr).AddrPort())
	r := bufio.NewReader(c)
	for {
		if _, err := r.ReadSlice('\n'); err != nil {
			return
		}
		s.Requests.Add(1)
		if _, err := c.Write(answer); err != nil {
			return
		}
	}
}

func (s *Server) receive(c *net.UDPConn, answer func(*Server, netip.AddrPort, []byte) []byte) {
	s.closing, s.udp = c.Close, c
	s.running.Go(func() {
		buf, oob := make([]byte, 64<<10), make([]byte, 128)
		for {
			n, nOOB, _, peer, err := c.ReadMsgUDPAddrPort(buf, oob)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue // an ICMP error about an earlier answer
			}
			s.Requests.Add(1)
			if reply := answer(s, peer, buf[:n]); reply != nil {
				// Ignore peers that are gone.
				_, _, _ = c.WriteMsgUDPAddrPort(reply, unpin(oob[:nOOB]), peer)
			}
		}
	})
}

// SpeakTo sends a peer an answer that it did not ask for, over its connection if there is one. peer is
// its address as the server sees it.
func (s *Server) SpeakTo(peer netip.AddrPort) error {
	if s.udp != nil {
		_, err := s.udp.WriteToUDPAddrPort(s.answer(peer), peer)
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		if unmap(c.RemoteAddr().(*net.TCPAddr).AddrPort()) == peer {
			_, err := c.Write(s.answer(peer))
			return err
		}
	}
	return fmt.Errorf("%s has no connection from %s", s.Name, peer)
}

// unpin prepares received packet info for sending: it keeps the source address, and leaves
// the device to routing.
func unpin(oob []byte) []byte {
	const header = int(unsafe.Sizeof(unix.Cmsghdr{}))
	if len(oob) >= header+unix.SizeofInet6Pktinfo {
		(*unix.Inet6Pktinfo)(unsafe.Pointer(&oob[header])).Ifindex = 0
	}
	return oob
}

func (s *Server) answer(peer netip.AddrPort) []byte {
	return fmt.Appendf(nil, "%s %s\n", s.Name, unmap(peer))
}

// Reply is what a Server said.
type Reply struct {
	Server string         // name of the sandbox that answered
	Peer   netip.AddrPort // the client, as the server sees it
}

// Ask connects to a server from inside the sandbox, sends one request and disconnects. See
// Dial for networks and addresses. Without a deadline in ctx it times out after two
// seconds.
func (s *Sandbox) Ask(ctx context.Context, network string, to netip.AddrPort) (Reply, error) {
	ctx, cancel := withDeadline(ctx, dialTimeout)
	defer cancel()
	c, err := s.Dial(ctx, network, to)
	if err != nil {
		return Reply{}, err
	}
	defer c.Close()
	r, err := AskConn(ctx, c)
	if network == "tcp" && err == nil {
		HangUp(ctx, c)
	}
	return r, wrap(err, "ask %s %s from %s", network, to, s.Name)
}

// HangUp shuts a TCP connection down, and waits until the peer has done so as well, so that
// conntrack sees the end. Close alone guarantees neither: a process that is being forked has a
// copy of the socket until it executes its program. The caller must still call Close.
func HangUp(ctx context.Context, c net.Conn) {
	tcp, ok := c.(*net.TCPConn)
	if !ok || setDeadline(ctx, c, dialTimeout) != nil {
		return
	}
	_ = tcp.CloseWrite()
	_, _ = io.Copy(io.Discard, tcp)
}

// AskConn sends one more request over a connection.
func AskConn(ctx context.Context, c net.Conn) (Reply, error) {
	if err := setDeadline(ctx, c, dialTimeout); err != nil {
		return Reply{}, err
	}
	if _, err := c.Write([]byte("?\n")); err != nil {
		return Reply{}, err
	}
	return hear(c)
}

// Hear waits for an answer that was not asked for, see SpeakTo.
func Hear(ctx context.Context, c net.Conn) (Reply, error) {
	if err := setDeadline(ctx, c, dialTimeout); err != nil {
		return Reply{}, err
	}
	return hear(c)
}

func hear(c net.Conn) (Reply, error) {
	var buf [256]byte
	n := 0
	for n == 0 || buf[n-1] != '\n' {
		m, err := c.Read(buf[n:])
		if err != nil {
			return Reply{}, err
		}
		n += m
	}
	return ParseReply(string(buf[:n]))
}

// ParseReply reads the text of an answer.
func ParseReply(text string) (Reply, error) {
	name, peer, _ := strings.Cut(strings.TrimSuffix(text, "\n"), " ")
	ap, err := netip.ParseAddrPort(peer)
	if err != nil {
		return Reply{}, fmt.Errorf("parse answer %q: %w", text, err)
	}
	return Reply{Server: name, Peer: ap}, nil
}

func unmap(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}
