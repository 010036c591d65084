// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/uuid"
)

// Uplink is the device that connects a node, pod or client to the network.
const Uplink = "eth0"

// The address plan, see the package comment.
var (
	fabric4 = netip.MustParsePrefix("172.18.255.254/16")
	fabric6 = netip.MustParsePrefix("fd00:18::ffff/64")

	nodes4   = netip.MustParsePrefix("172.18.0.0/16")
	nodes6   = netip.MustParsePrefix("fd00:18::/64")
	clients4 = netip.MustParsePrefix("198.51.100.0/24")
	clients6 = netip.MustParsePrefix("2001:db8:51:100::/64")

	pods4 = netip.MustParsePrefix("10.244.0.0/16")
	pods6 = netip.MustParsePrefix("fd00:10:244::/48")

	// ServicePrefix4 and ServicePrefix6 hold cluster IPs.
	ServicePrefix4 = netip.MustParsePrefix("10.96.0.0/16")
	ServicePrefix6 = netip.MustParsePrefix("fd00:10:96::/112")
	// ExternalPrefix4 and ExternalPrefix6 hold load-balancer and external IPs.
	ExternalPrefix4 = netip.MustParsePrefix("203.0.113.0/24")
	ExternalPrefix6 = netip.MustParsePrefix("2001:db8:203:113::/64")
)

// Node is a machine of the cluster: the host's network namespace and the cgroup
// that covers everything running on it.
type Node struct {
	*Sandbox
	Index      int
	PodPrefix4 netip.Prefix
	PodPrefix6 netip.Prefix
	// FabricLink is the device at the fabric's end of the node's link.
	FabricLink         string
	lab                *Lab
	settings           NodeSettings
	mtu                int // of the node's link
	pods               []*Pod
	nextP              int
	gateway4, gateway6 netip.Addr // node end of pod links
	kubepods           string
}

// Pod is a pod of one node.
type Pod struct {
	*Sandbox
	Node *Node
	// UID is that of the Pod object: its cgroup is named as by kubelet.
	UID string
	// HostLink is the device at the node's end of the pod's link, if the lab has attached it.
	HostLink string
}

// Client is a machine outside the cluster, routed to the nodes by the fabric.
type Client struct {
	*Sandbox
	// FabricLink is the device at the fabric's end of the client's link.
	FabricLink string
	lab        *Lab
}

// Node adds a node. Names are used in cgroup paths; failure fails the test, or
// panics in a lab made with New. AddNode returns the error instead.
func (l *Lab) Node(name string) *Node { return must(l, name, l.AddNode) }

// Pod adds a pod to the node; see Lab.Node on failure.
func (n *Node) Pod(name string) *Pod { return must(n.lab, name, n.AddPod) }

// Client adds a client; see Lab.Node on failure.
func (l *Lab) Client(name string) *Client { return must(l, name, l.AddClient) }

func must[T any](l *Lab, name string, add func(string) (T, error)) T {
	v, err := add(name)
	if err != nil {
		l.fail(err)
	}
	return v
}

func (l *Lab) openFabric() (err error) {
	// No cgroup: it runs no processes.
	if l.fabric, err = newSandbox("fabric"); err != nil {
		return err
	}
	if err := makeThreaded(filepath.Join(l.cgroup, "clients")); err != nil {
		return err
	}
	f := l.fabric
	f.Addr4, f.Addr6 = fabric4.Addr(), fabric6.Addr()
	if err := f.Do(forward); err != nil {
		return err
	}
	snooping := false // without a querier, neighbour discovery would suffer
	br := &netlink.Bridge{
		LinkAttrs: netlink.LinkAttrs{
			Name: "br0", MTU: l.opts.MTU,
			// Otherwise the address changes when ports come and go, and nodes
			// send to an address that does not exist any more.
			HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 0xfe},
		},
		MulticastSnooping: &snooping,
	}
	if err := f.nl.LinkAdd(br); err != nil {
		return fmt.Errorf("create bridge: %w", err)
	}
	if err := f.configure("br0", fabric4, fabric6); err != nil {
		return err
	}
	// Drop untranslated packets without an ICMP error; see the package comment.
	for _, p := range []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)} {
		if err := f.route(netlink.Route{Dst: ipNet(p), Type: unix.RTN_BLACKHOLE}); err != nil {
			return err
		}
	}
	return nil
}

// AddNode adds a node.
func (l *Lab) AddNode(name string) (_ *Node, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, ErrClosed
	}
	if l.nextN == maxIndex {
		return nil, fmt.Errorf("add node %s: the address plan ends at %d", name, maxIndex)
	}
	i := l.nextN + 1
	root := filepath.Join(l.cgroup, name)
	s, err := l.newSandbox(name, root, filepath.Join(root, "system"))
	if err != nil {
		return nil, err
	}
	l.nextN = i
	n := &Node{
		Sandbox:    s,
		Index:      i,
		PodPrefix4: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(i), 0}), 24),
		PodPrefix6: netip.PrefixFrom(netip.MustParseAddr(fmt.Sprintf("fd00:10:244:%x::", i)), 64),
		FabricLink: fmt.Sprintf("node%d", i),
		lab:        l,
		mtu:        l.opts.MTU,
		kubepods:   filepath.Join(root, "kubepods"),
	}
	n.Addr4, n.Addr6 = host(nodes4, i), host(nodes6, i)
	n.gateway4, n.gateway6 = host(n.PodPrefix4, 254), host(n.PodPrefix6, 0xffff)
	l.nodes = append(l.nodes, n)
	if err := n.wire(); err != nil {
		l.nodes = l.nodes[:len(l.nodes)-1]
		return nil, errors.Join(fmt.Errorf("add node %s: %w", name, err), n.shut())
	}
	return n, nil
}

// wire joins a new node to the fabric and to the nodes before it.
func (n *Node) wire() error {
	l := n.lab
	if err := makeThreaded(n.kubepods); err != nil {
		return err
	}
	if err := n.Do(forward); err != nil {
		return err
	}
	if err := n.plug(); err != nil {
		return err
	}
	err := n.configure(Uplink, netip.PrefixFrom(n.Addr4, nodes4.Bits()), netip.PrefixFrom(n.Addr6, nodes6.Bits()))
	if err != nil {
		return err
	}
	if err := n.awaitUplink(); err != nil {
		return err
	}
	for _, r := range []netlink.Route{
		{Gw: fabric4.Addr().AsSlice()},
		{Gw: fabric6.Addr().AsSlice(), Dst: ipNet(netip.PrefixFrom(netip.IPv6Unspecified(), 0))},
		// Packets to unused pod addresses must not loop between node and fabric.
		{Dst: ipNet(n.PodPrefix4), Type: unix.RTN_BLACKHOLE},
		{Dst: ipNet(n.PodPrefix6), Type: unix.RTN_BLACKHOLE},
	} {
		if err := n.route(r); err != nil {
			return err
		}
	}
	if err := n.reachableFrom(l.fabric); err != nil {
		return err
	}
	for _, other := range l.nodes {
		if other == n {
			continue
		}
		if err := errors.Join(n.reachableFrom(other.Sandbox), other.reachableFrom(n.Sandbox)); err != nil {
			return err
		}
	}
	return errors.Join(n.set(l.opts.Nodes), n.pause(l.opts))
}

// plug makes the node's link, and joins it to the others.
func (n *Node) plug() error { return n.plugAs(n.FabricLink, Uplink) }

func (n *Node) plugAs(fabricLink, device string) error {
	f, opts := n.lab.fabric, n.lab.opts
	opts.MTU = n.mtu
	if err := f.veth(fabricLink, n.Sandbox, device, opts); err != nil {
		return err
	}
	if opts.XDP {
		if err := f.ReceivesXDP(fabricLink); err != nil {
			return fmt.Errorf("let %s receive what XDP sends: %w", fabricLink, err)
		}
	}
	return f.join(fabricLink)
}

// join makes a device of the fabric a port of its bridge.
func (s *Sandbox) join(name string) error {
	br, err := s.nl.LinkByName("br0")
	if err != nil {
		return err
	}
	link, err := s.nl.LinkByName(name)
	if err != nil {
		return err
	}
	if err := s.nl.LinkSetMaster(link, br); err != nil {
		return fmt.Errorf("join bridge: %w", err)
	}
	return wrap(s.nl.LinkSetUp(link), "set %s up", name)
}

func (n *Node) awaitUplink() error {
	f := n.lab.fabric
	return errors.Join(f.awaitLink("br0"), f.awaitLink(n.FabricLink), n.awaitLink(Uplink))
}

// reachableFrom adds routes to the node's pods to a machine on the nodes' subnet.
func (n *Node) reachableFrom(s *Sandbox) error {
	return errors.Join(
		s.route(n.limited(netlink.Route{Dst: ipNet(n.PodPrefix4), Gw: n.Addr4.AsSlice()})),
		s.route(n.limited(netlink.Route{Dst: ipNet(n.PodPrefix6), Gw: n.Addr6.AsSlice()})))
}

// AddPod adds a pod to the node.
func (n *Node) AddPod(name string) (*Pod, error) {
	l := n.lab
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || !slices.Contains(l.nodes, n) {
		return nil, ErrClosed
	}
	if n.nextP == maxIndex {
		return nil, fmt.Errorf("add pod %s: the address plan ends at %d", name, maxIndex)
	}
	i := n.nextP + 1
	uid := string(uuid.NewUUID()) // other labs on this machine have others
	s, err := l.newSandbox(name, filepath.Join(n.kubepods, "pod"+uid))
	if err != nil {
		return nil, err
	}
	n.nextP = i
	p := &Pod{Sandbox: s, Node: n, UID: uid, HostLink: fmt.Sprintf("pod%d", i)}
	p.Addr4, p.Addr6 = host(n.PodPrefix4, i), host(n.PodPrefix6, i)
	if !l.opts.Unattached {
		err = n.lead(p.HostLink, p.Sandbox, [2]netip.Addr{n.gateway4, n.gateway6}, [2]netip.Addr{n.Addr4, n.Addr6}, l.opts)
	}
	if err == nil {
		err = p.pause(l.opts)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("add pod %s: %w", name, err), p.shut())
	}
	n.pods = append(n.pods, p)
	return p, nil
}

// AddClient adds a client.
func (l *Lab) AddClient(name string) (*Client, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, ErrClosed
	}
	if l.nextC == maxIndex {
		return nil, fmt.Errorf("add client %s: the address plan ends at %d", name, maxIndex)
	}
	i := l.nextC + 1
	s, err := l.newSandbox(name, filepath.Join(l.cgroup, "clients", name))
	if err != nil {
		return nil, err
	}
	l.nextC = i
	c := &Client{Sandbox: s, lab: l, FabricLink: fmt.Sprintf("client%d", i)}
	c.Addr4, c.Addr6 = host(clients4, i), host(clients6, i)
	err = l.fabric.lead(c.FabricLink, c.Sandbox, [2]netip.Addr{host(clients4, 254), host(clients6, 0xffff)}, [2]netip.Addr{}, l.opts)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("add client %s: %w", name, err), c.shut())
	}
	l.clients = append(l.clients, c)
	return c, nil
}

// Close removes the node and its pods. Other nodes keep their routes to it, as they
// would when a machine dies.
func (n *Node) Close() error {
	l := n.lab
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.nodes, n)
	if l.closed || i < 0 {
		return nil
	}
	l.nodes = slices.Delete(l.nodes, i, i+1)
	var errs []error
	for _, p := range n.pods {
		errs = append(errs, p.shut())
	}
	n.pods = nil
	return errors.Join(append(errs, n.shut())...)
}

// Close removes the pod, its link and the node's routes to it. Its address is not
// used again.
func (p *Pod) Close() error {
	l := p.Node.lab
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(p.Node.pods, p)
	if l.closed || i < 0 {
		return nil
	}
	p.Node.pods = slices.Delete(p.Node.pods, i, i+1)
	if l.opts.Unattached {
		return p.shut()
	}
	// The kernel removes links of a namespace some time after its end.
	return errors.Join(p.Node.unlink(p.HostLink), p.shut())
}

// Close removes the client.
func (c *Client) Close() error {
	l := c.lab
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.clients, c)
	if l.closed || i < 0 {
		return nil
	}
	l.clients = slices.Delete(l.clients, i, i+1)
	return errors.Join(l.fabric.unlink(c.FabricLink), c.shut())
}

// pause starts the sandbox's pause process, if wanted.
func (s *Sandbox) pause(opts Options) error {
	if !opts.Pause {
		return nil
	}
	return wrap(s.Command(context.Background(), "sleep", "infinity").Start(), "start pause process")
}

// lead joins child to s by a link of its own: /32 and /128 routes at s, a default
// route at child. gateway is s' end of the link; src, where valid, is what s
// uses as source towards the child instead.
func (s *Sandbox) lead(name string, child *Sandbox, gateway, src [2]netip.Addr, opts Options) error {
	if err := s.veth(name, child, Uplink, opts); err != nil {
		return err
	}
	if err := s.configure(name, single(gateway[0]), single(gateway[1])); err != nil {
		return err
	}
	if err := child.configure(Uplink, single(child.Addr4), single(child.Addr6)); err != nil {
		return err
	}
	if err := errors.Join(s.awaitLink(name), child.awaitLink(Uplink)); err != nil {
		return err
	}
	down, err := s.nl.LinkByName(name)
	if err != nil {
		return err
	}
	up, err := child.nl.LinkByName(Uplink)
	if err != nil {
		return err
	}
	for i, dst := range []netip.Addr{child.Addr4, child.Addr6} {
		r := netlink.Route{LinkIndex: down.Attrs().Index, Dst: ipNet(single(dst)), Scope: netlink.SCOPE_LINK}
		if src[i].IsValid() {
			r.Src = src[i].AsSlice()
		}
		if err := s.route(r); err != nil {
			return err
		}
		any := netip.IPv4Unspecified()
		if dst.Is6() {
			any = netip.IPv6Unspecified()
		}
		for _, r := range []netlink.Route{
			{LinkIndex: up.Attrs().Index, Dst: ipNet(single(gateway[i])), Scope: netlink.SCOPE_LINK},
			{LinkIndex: up.Attrs().Index, Dst: ipNet(netip.PrefixFrom(any, 0)), Gw: gateway[i].AsSlice()},
		} {
			if err := child.route(r); err != nil {
				return err
			}
		}
	}
	return nil
}

// veth makes a link from s to a device of child. It leaves no trace
// in the namespace of the caller.
func (s *Sandbox) veth(name string, child *Sandbox, device string, opts Options) error {
	err := Connect(s, name, child, device, opts.MTU)
	if err == nil && opts.NoOffload {
		err = errors.Join(s.WithoutOffload(name), child.WithoutOffload(device))
	}
	return wrap(err, "create link %s", name)
}

// configure adds addresses to a device and sets it up.
func (s *Sandbox) configure(name string, addrs ...netip.Prefix) error {
	link, err := s.nl.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find link %s: %w", name, err)
	}
	for _, a := range addrs {
		na := &netlink.Addr{IPNet: ipNet(a)}
		if a.Addr().Is6() {
			na.Flags = unix.IFA_F_NODAD
		}
		if err := s.nl.AddrAdd(link, na); err != nil {
			return fmt.Errorf("add %s to %s: %w", a, name, err)
		}
	}
	return wrap(s.nl.LinkSetUp(link), "set %s up", name)
}

// awaitLink waits until a device is operational and its IPv6 addresses work. The
// kernel does this in the background after both ends were set up. Earlier packets
// are lost, and a lost SYN costs a test a whole second.
func (s *Sandbox) awaitLink(name string) error {
	deadline := time.Now().Add(removeLimit)
	for wait := 50 * time.Microsecond; ; wait = min(2*wait, 10*time.Millisecond) {
		link, err := s.nl.LinkByName(name)
		if err != nil {
			return fmt.Errorf("find link %s: %w", name, err)
		}
		ready := link.Attrs().OperState == netlink.OperUp
		if ready {
			if ready, err = s.addressed(link); err != nil {
				return fmt.Errorf("check addresses of %s: %w", name, err)
			}
		}
		if ready {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("link %s in %s does not come up", name, s.Name)
		}
		time.Sleep(wait)
	}
}

// addressed reports whether the IPv6 addresses of a device are usable: each of them has
// a local route.
func (s *Sandbox) addressed(link netlink.Link) (bool, error) {
	addrs, err := s.nl.AddrList(link, netlink.FAMILY_V6)
	if errors.Is(err, netlink.ErrDumpInterrupted) {
		return false, nil // the list changed during the dump
	}
	if err != nil {
		return false, err
	}
	local := &netlink.Route{Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, LinkIndex: link.Attrs().Index}
	routes, err := s.nl.RouteListFiltered(netlink.FAMILY_V6, local, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE|netlink.RT_FILTER_OIF)
	if errors.Is(err, netlink.ErrDumpInterrupted) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	// Neighbour discovery for forwarded packets needs a link-local address. For ports
	// of a bridge, the bridge has it.
	ready := link.Attrs().MasterIndex != 0 || slices.ContainsFunc(addrs, func(a netlink.Addr) bool {
		return a.IP.IsLinkLocalUnicast()
	})
	for _, a := range addrs {
		delivered := slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.Dst != nil && r.Dst.IP.Equal(a.IP) })
		ready = ready && delivered && a.Flags&unix.IFA_F_TENTATIVE == 0
	}
	return ready, nil
}

func (s *Sandbox) unlink(name string) error {
	link, err := s.nl.LinkByName(name)
	if err != nil {
		return wrap(err, "find link %s", name)
	}
	return wrap(s.nl.LinkDel(link), "delete link %s", name)
}

func (s *Sandbox) route(r netlink.Route) error {
	return wrap(s.nl.RouteReplace(&r), "add route in %s to %v", s.Name, r.Dst)
}

// forward turns the namespace into a router.
func forward() error {
	return errors.Join(sysctl("ipv4/ip_forward", "1"), sysctl("ipv6/conf/all/forwarding", "1"))
}

// host returns address number i of a prefix.
func host(p netip.Prefix, i int) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	low := b[len(b)-2:]
	binary.BigEndian.PutUint16(low, binary.BigEndian.Uint16(low)+uint16(i))
	a, _ := netip.AddrFromSlice(b)
	return a
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// newSandbox makes a sandbox with the lab's options for clients.
func (l *Lab) newSandbox(name string, cgroups ...string) (*Sandbox, error) {
	s, err := newSandbox(name, cgroups...)
	if err == nil {
		s.portsInTurn = l.opts.PortsInTurn
	}
	return s, err
}
