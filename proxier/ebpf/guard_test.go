// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/monitor"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// guarded are load balancer IPs that one pod of the node may use, and others may not.
var guarded = []netip.AddrPort{netip.MustParseAddrPort("203.0.113.10:80"), netip.MustParseAddrPort("[2001:db8:203:113::10]:80")}

// socket opens a socket of that type and of the family of an address.
func socket(kind int, to netip.Addr) (*os.File, error) {
	family := unix.AF_INET6
	if to.Is4() {
		family = unix.AF_INET
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	return os.NewFile(uintptr(fd), "client"), nil
}

func sockaddrOf(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// answered reads the answer to a datagram, if one comes.
func answered(fd int) error {
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 2}); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	_, _, err := unix.Recvfrom(fd, make([]byte, 256), 0)
	return os.NewSyscallError("recvfrom", err)
}

// pktinfo is a control message that sets the source of a datagram.
func pktinfo(source netip.Addr) []byte {
	if source.Is4() {
		return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: source.As4()})
	}
	return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: source.As16()})
}

// freebind binds a socket to an address that the pod does not have.
func freebind(fd int, a netip.Addr) error {
	level, option := unix.IPPROTO_IPV6, unix.IPV6_FREEBIND
	if a.Is4() {
		level, option = unix.IPPROTO_IP, unix.IP_FREEBIND
	}
	if err := unix.SetsockoptInt(fd, level, option, 1); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	return os.NewSyscallError("bind", unix.Bind(fd, sockaddrOf(netip.AddrPortFrom(a, 0))))
}

// extension is an IPv6 destination or hop-by-hop options header without options.
var extension = string([]byte{0, 0, 1, 4, 0, 0, 0, 0})

// exhaust uses up the memory that the kernel grants a socket for options.
func exhaust(fd int) error {
	for i := uint32(1); i < 1<<20; i++ {
		group := unix.IPv6Mreq{Multiaddr: [16]byte{0xff, 0x05}}
		binary.BigEndian.PutUint32(group.Multiaddr[12:], i)
		switch err := unix.SetsockoptIPv6Mreq(fd, unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP, &group); {
		case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.ENOBUFS):
			return nil
		case err != nil:
			return os.NewSyscallError("setsockopt", err)
		}
	}
	return errors.New("a socket can have any number of groups")
}

// guardedService is a Service with source ranges that admit a pod.
func guardedService(admitted *lab.Pod) *v1.Service {
	return dualService(func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Spec.LoadBalancerSourceRanges = []string{admitted.Addr4.String() + "/32", admitted.Addr6.String() + "/128"}
		for _, lb := range guarded {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: lb.Addr().String()})
		}
	})
}

// TestSourceRangesOfPods: a pod that source ranges do not admit reaches no backend, whatever it does
// to its socket. A pod that they admit reaches one in the same way.
func TestSourceRangesOfPods(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	web, admitted, stranger := serve(t, one.Pod("web")), one.Pod("admitted"), one.Pod("stranger")
	n := newPodNode(t, one, l)
	n.OnServiceAdd(guardedService(admitted))
	n.setPods(web)
	n.sync(t)
	own := func(p *lab.Pod, a netip.Addr) netip.Addr { return addrOf(p.Sandbox, a) }
	connect := func(fd int, to netip.AddrPort) error {
		return os.NewSyscallError("connect", unix.Connect(fd, sockaddrOf(to)))
	}
	send := func(fd int) error {
		_, err := unix.Write(fd, []byte("?\n"))
		return os.NewSyscallError("write", err)
	}
	sendTo := func(fd int, to netip.AddrPort, flags int) error {
		return os.NewSyscallError("sendto", unix.Sendto(fd, []byte("?\n"), flags, sockaddrOf(to)))
	}

	type attempt struct {
		name   string
		kind   int
		only6  bool
		refuse bool // an admitted pod is refused as well
		try    func(fd int, from *lab.Pod, to netip.AddrPort) error
	}
	attempts := []attempt{
		{name: "connected", kind: unix.SOCK_DGRAM, try: func(fd int, _ *lab.Pod, to netip.AddrPort) error {
			return errors.Join(connect(fd, to), send(fd))
		}},
		{name: "unconnected", kind: unix.SOCK_DGRAM, try: func(fd int, _ *lab.Pod, to netip.AddrPort) error { return sendTo(fd, to, 0) }},
		{name: "held back", kind: unix.SOCK_DGRAM, try: func(fd int, _ *lab.Pod, to netip.AddrPort) error {
			return errors.Join(sendTo(fd, to, unix.MSG_MORE), sendTo(fd, to, 0))
		}},
		{name: "connected, held back", kind: unix.SOCK_DGRAM, try: func(fd int, _ *lab.Pod, to netip.AddrPort) error {
			if err := connect(fd, to); err != nil {
				return err
			}
			return errors.Join(os.NewSyscallError("send", unix.Send(fd, []byte("?"), unix.MSG_MORE)), send(fd))
		}},
		{name: "bound to an admitted address, sent from its own", kind: unix.SOCK_DGRAM, try: func(fd int, from *lab.Pod, to netip.AddrPort) error {
			if err := freebind(fd, own(admitted, to.Addr())); err != nil {
				return err
			}
			return os.NewSyscallError("sendmsg", unix.Sendmsg(fd, []byte("?\n"), pktinfo(own(from, to.Addr())), sockaddrOf(to), 0))
		}},
		{name: "bound to an admitted address, connected, sent from its own", kind: unix.SOCK_DGRAM, only6: true, try: func(fd int, from *lab.Pod, to netip.AddrPort) error {
			if err := errors.Join(freebind(fd, own(admitted, to.Addr())), connect(fd, to)); err != nil {
				return err
			}
			return os.NewSyscallError("sendmsg", unix.Sendmsg(fd, []byte("?\n"), pktinfo(own(from, to.Addr())), nil, 0))
		}},
		{name: "without memory", kind: unix.SOCK_DGRAM, only6: true, refuse: true, try: func(fd int, _ *lab.Pod, to netip.AddrPort) error {
			if err := errors.Join(exhaust(fd), connect(fd, to)); err != nil {
				return err
			}
			return send(fd)
		}},
		{name: "without memory, unconnected", kind: unix.SOCK_DGRAM, only6: true, refuse: true, try: func(fd int, _ *lab.Pod, to netip.AddrPort) error {
			return errors.Join(exhaust(fd), sendTo(fd, to, 0))
		}},
		{name: "without memory, IPv4 by IPv6", kind: unix.SOCK_DGRAM, only6: true, refuse: true, try: func(fd int, _ *lab.Pod, _ netip.AddrPort) error {
			return errors.Join(exhaust(fd), sendTo(fd, netip.AddrPortFrom(netip.AddrFrom16(guarded[0].Addr().As16()), 80), 0))
		}},
	}
	for name, option := range map[string]int{"destination options": unix.IPV6_DSTOPTS, "hop-by-hop options": unix.IPV6_HOPOPTS} {
		for kind, protocol := range map[int]string{unix.SOCK_DGRAM: "UDP", unix.SOCK_STREAM: "TCP"} {
			attempts = append(attempts, attempt{name: name + ", " + protocol, kind: kind, only6: true, try: func(fd int, _ *lab.Pod, to netip.AddrPort) error {
				err := os.NewSyscallError("setsockopt", unix.SetsockoptString(fd, unix.IPPROTO_IPV6, option, extension))
				if err = errors.Join(err, connect(fd, to)); err != nil {
					return err
				}
				return send(fd)
			}})
		}
	}
	var m *monitor.Monitor
	perPacket := 0
	if kernel.AtLeast(t, 5, 17) { // bpf_get_func_arg
		m = newMonitor(t, plenty)
		if _, err := follow(t, m, one); errors.Is(err, monitor.ErrNotSupported) && os.Getenv(lab.RequireModulesEnv) != "1" {
			t.Logf("without the monitor: %v", err)
			m = nil
		} else if err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range attempts {
		for _, to := range guarded {
			if to.Addr().Is4() && test.only6 {
				continue
			}
			for _, from := range []*lab.Pod{stranger, admitted} {
				t.Run(fmt.Sprintf("%s/%s/%s", test.name, to.Addr(), from.Name), func(t *testing.T) {
					reached := false
					err := from.Do(func() error {
						f, err := socket(test.kind, to.Addr())
						if err != nil {
							return err
						}
						defer f.Close()
						fd := int(f.Fd())
						if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 300); test.kind == unix.SOCK_STREAM && err != nil {
							return err
						}
						if err := test.try(fd, from, to); err != nil {
							return err
						}
						err = answered(fd)
						reached = err == nil
						return err
					})
					switch {
					case from == admitted && !test.refuse:
						if !reached {
							t.Errorf("an admitted pod was refused: %v", err)
						}
					case reached:
						t.Error("reached the backend")
					case !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.ETIMEDOUT):
						t.Errorf("failed with %v, want EPERM or, for TCP, ETIMEDOUT", err)
					case m != nil:
						dialled := to
						if strings.HasSuffix(test.name, "IPv4 by IPv6") {
							dialled = guarded[0]
						}
						if f := failureAt(t, m, dialled); f.PID == 0 { // by its packet
							perPacket++
							if f.Reason != lbmap.ReasonName(lbmap.DropSourceRange) || f.Client.Addr() != own(from, dialled.Addr()) {
								t.Errorf("the monitor has %+v", f)
							}
						}
					}
				})
			}
		}
	}
	if m != nil && perPacket == 0 {
		t.Error("the monitor has no packet that was dropped")
	}
}

// TestSourceRangesOfHeldBack is the limit that docs/limits.md names: a socket that connects elsewhere while it holds a datagram back is no longer
// known as one whose packets are checked. With IPv6 that datagram goes to the endpoint, with IPv4 the kernel sends it to the new peer.
func TestSourceRangesOfHeldBack(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	web, stranger := one.Pod("web"), one.Pod("stranger")
	server, err := web.ServeUDP(targetPort)
	if err != nil {
		t.Fatal(err)
	}
	beside, err := web.ServeUDP(targetPort + 1)
	if err != nil {
		t.Fatal(err)
	}
	n := newPodNode(t, one, l)
	n.OnServiceAdd(guardedService(web))
	n.setPods(web)
	n.sync(t)
	heldBack := func(to netip.AddrPort) {
		t.Helper()
		err := stranger.Do(func() error {
			f, err := socket(unix.SOCK_DGRAM, to.Addr())
			if err != nil {
				return err
			}
			defer f.Close()
			fd, elsewhere := int(f.Fd()), netip.AddrPortFrom(addrOf(web.Sandbox, to.Addr()), targetPort+1)
			return errors.Join(unix.Sendto(fd, []byte("?"), unix.MSG_MORE, sockaddrOf(to)), unix.Connect(fd, sockaddrOf(elsewhere)), unix.Send(fd, []byte("\n"), 0))
		})
		if err != nil {
			t.Fatalf("%s: %v", to, err)
		}
	}
	// IPv4 first: where it goes is seen once that of IPv6 has arrived.
	heldBack(guarded[0])
	heldBack(guarded[1])
	received := func(s *lab.Server, want int64) {
		t.Helper()
		if err := wait.PollUntilContextTimeout(t.Context(), time.Millisecond, 10*time.Second, true, func(context.Context) (bool, error) {
			return s.Requests.Load() == want, nil
		}); err != nil {
			t.Errorf("%d datagrams at port %d, want %d", s.Requests.Load(), s.Port, want)
		}
	}
	received(beside, 1)
	received(server, 1)
}

// TestSourceRangesOfOtherAddresses: where source ranges admit all pods by the detector's CIDRs, they
// do not admit an address of a pod that is in none of them.
func TestSourceRangesOfOtherAddresses(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	web, client := serve(t, one.Pod("web")), one.Pod("client")
	n := newPodNode(t, one, l)
	n.OnServiceAdd(dualService(func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Spec.LoadBalancerSourceRanges = []string{one.PodPrefix4.String(), one.PodPrefix6.String()}
		for _, lb := range guarded {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: lb.Addr().String()})
		}
	}))
	n.setPods(web)
	n.sync(t)
	for i, other := range []netip.Addr{netip.MustParseAddr("172.31.0.9"), netip.MustParseAddr("2001:db8:31::9")} {
		link, err := client.Netlink().LinkByName(lab.Uplink)
		if err != nil {
			t.Fatal(err)
		}
		if err := client.Netlink().AddrAdd(link, &netlink.Addr{IPNet: netlink.NewIPNet(other.AsSlice()), Flags: unix.IFA_F_NODAD}); err != nil {
			t.Fatal(err)
		}
		for _, source := range []netip.Addr{addrOf(client.Sandbox, other), other} {
			err := client.Do(func() error {
				f, err := socket(unix.SOCK_DGRAM, other)
				if err != nil {
					return err
				}
				defer f.Close()
				return unix.Sendmsg(int(f.Fd()), []byte("?\n"), pktinfo(source), sockaddrOf(guarded[i]), 0)
			})
			if want := source == other; errors.Is(err, unix.EPERM) != want || !want && err != nil {
				t.Errorf("a datagram from %s: %v, want EPERM: %v", source, err, want)
			}
		}
	}
}
