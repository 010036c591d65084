// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/sockdiag"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Where the programs translate a flow.
const (
	AtPackets = "packets"
	AtSocket  = "socket"
)

// FlowView is a connection to a service port, or the packets of a UDP client to one.
type FlowView struct {
	// The service port; empty if it is gone, or if the flow is of none and only gets another source port.
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Port      string `json:"port"`
	Protocol  string `json:"protocol"`
	// At is AtPackets or AtSocket.
	At string `json:"at"`
	// Client is the address of a socket that may not be bound to one.
	Client   netip.AddrPort `json:"client"`
	Frontend netip.AddrPort `json:"frontend"`
	Backend  netip.AddrPort `json:"backend"`
	// Source is what the backend sees as the client, if that is another address.
	Source *netip.AddrPort `json:"source"`
	State  string          `json:"state"`
	// Action is what happens to packets; empty at a socket.
	Action string `json:"action"`
	// Device is the one that requests come in by; empty at a socket.
	Device string `json:"device"`
	// Cookie is that of a socket; 0 for packets.
	Cookie uint64 `json:"cookie"`
	// AgeSeconds is the time since the first packet, or since the socket was translated; null of further peers of a UDP
	// socket, and where programs of an earlier version began.
	AgeSeconds *int64 `json:"ageSeconds"`
	// IdleSeconds is the time since the last packet, of a TCP socket since the last data; null where the kernel does
	// not tell.
	IdleSeconds *int64 `json:"idleSeconds"`
	// RTTMicroseconds is the smoothed round-trip time of a TCP socket; null elsewhere.
	RTTMicroseconds *uint32 `json:"rttMicroseconds"`
	// Requests and Replies are packets and bytes: of whole IP packets on devices, and of the acknowledged payload
	// of a TCP socket; null where nothing counts them.
	Requests *flowtable.Traffic `json:"requests"`
	Replies  *flowtable.Traffic `json:"replies"`
}

// Flows calls fn with all flows, or those that are translated at one place. procRoot is where the network namespaces of sockets are found, for what only
// the kernel's socket tables know; it need not show all. TCP sockets are missing while ebpf.tcpPeerNames is off.
// If it cannot read sockets, it has called fn with the others.
func (i *Inspector) Flows(ctx context.Context, at, procRoot string, fn func(FlowView)) error {
	names := serviceNames{tables: i.tables, known: map[uint32]lbmap.Service{}}
	if at != AtSocket {
		if err := i.packetFlows(&names, fn); err != nil {
			return err
		}
	}
	if at == AtPackets {
		return nil
	}
	if err := i.socketFlows(ctx, procRoot, &names, fn); err != nil {
		return fmt.Errorf("%w: %w", ErrNoSockets, err)
	}
	return nil
}

// ErrNoSockets says that the sockets cannot be read.
var ErrNoSockets = errors.New("cannot read the sockets")

// serviceNames finds names of service ports by their ids.
type serviceNames struct {
	tables *lbmap.Tables
	known  map[uint32]lbmap.Service
}

func (n *serviceNames) describe(v *FlowView, id uint32) {
	if id == 0 || int(id) >= len(n.tables.Services) {
		return
	}
	e, ok := n.known[id]
	if !ok {
		e = copyWords(&n.tables.Services[id])
		n.known[id] = e
	}
	if e.State != lbmap.ServiceFree {
		v.Namespace, v.Name, v.Port = e.SplitName()
	}
}

func (i *Inspector) packetFlows(names *serviceNames, fn func(FlowView)) error {
	if i.Maps["tdm_flow"] == nil || i.Maps["tdm_flow_entry"] == nil {
		return nil // sockets alone
	}
	used, err := i.flowsUsed()
	if err != nil || used == 0 {
		return err
	}
	devices := map[uint32]string{}
	one := func(r flowtable.Record) {
		v := FlowView{
			Protocol: r.Protocol.String(), At: AtPackets, Client: r.Client, Frontend: r.Frontend, Backend: r.Backend,
			State: r.State.String(), Action: actionText(r.Action), IdleSeconds: new(int64(r.Idle / time.Second)),
			Requests: &r.Requests, Replies: &r.Replies,
		}
		if r.Age != nil {
			v.AgeSeconds = new(int64(*r.Age / time.Second))
		}
		if r.Source != r.Client {
			v.Source = &r.Source
		}
		name, ok := devices[r.Device]
		if !ok {
			if l, err := netlink.LinkByIndex(int(r.Device)); err == nil {
				name = l.Attrs().Name
			}
			devices[r.Device] = name
		}
		v.Device = name
		names.describe(&v, r.Service)
		fn(v)
	}
	return i.withFlowMaps(func(maps lbmap.Maps) error { return flowtable.Records(i.tables, maps, one) })
}

// withFlowMaps opens the maps of flows so that their memory can be mapped, see readOnlyMapping.
func (i *Inspector) withFlowMaps(fn func(lbmap.Maps) error) error {
	maps := lbmap.Maps{}
	defer maps.Close()
	for _, name := range []string{"tdm_flow", "tdm_flow_entry"} {
		if i.Maps[name] == nil {
			return fmt.Errorf("%w: no program uses map %s", lbmap.ErrLayout, name)
		}
		m, err := lbmap.Reopen(i.Maps[name], 0)
		if err != nil {
			return err
		}
		maps[name] = m
	}
	return fn(maps)
}

func actionText(action uint8) string {
	switch action {
	case lbmap.ActionLocal:
		return "deliver"
	case lbmap.ActionSNAT:
		return "forward"
	case lbmap.ActionRemapOut, lbmap.ActionRemapIn:
		return "remap port"
	case lbmap.ActionDirect:
		return "direct"
	}
	return fmt.Sprintf("action %d", action)
}

// socketFlows lists sockets of all network namespaces.
func (i *Inspector) socketFlows(ctx context.Context, procRoot string, names *serviceNames, fn func(FlowView)) (err error) {
	m := i.Maps["tdm_sock"]
	if m == nil {
		return nil
	}
	reader, err := sockdiag.NewStorageReader(m, sockdiag.StorageOptions{ProcRoot: procRoot})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, reader.Close()) }()
	sockets, err := reader.Read(ctx)
	if err != nil || len(sockets) == 0 {
		return err
	}
	tcp, err := tcpStates(ctx, procRoot, sockets)
	if err != nil {
		return err
	}
	now := flowtable.MonotonicSeconds()
	many := map[uint64]netip.AddrPort{} // clients that have further peers
	for cookie, s := range sockets {
		var dest lbmap.SocketDest
		if len(s.Storage) != int(unsafe.Sizeof(dest)) {
			return fmt.Errorf("%w: map tdm_sock has values of %d bytes", lbmap.ErrLayout, len(s.Storage))
		}
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&dest)), unsafe.Sizeof(dest)), s.Storage)
		v := FlowView{
			Protocol: proxier.Protocol(dest.Proto).String(), At: AtSocket, Cookie: cookie,
			Client: s.Local, Frontend: lbmap.ToAddrPort(dest.Vip, dest.VipPort), Backend: lbmap.ToAddrPort(dest.Addr, dest.Port),
			State: socketState(&s, &dest),
		}
		if dest.Created != 0 {
			v.AgeSeconds = new(int64(flowtable.SecondsSince(dest.Created, now) / time.Second))
		}
		// A socket that is opening has had no data, and times since the start of the machine.
		if info := tcp[cookie]; info != nil && s.State != sockdiag.SynSent {
			v.IdleSeconds, v.RTTMicroseconds = new(int64(min(info.Last_data_sent, info.Last_data_recv)/1000)), new(info.Rtt)
			v.Requests = &flowtable.Traffic{Packets: uint64(info.Segs_out), Bytes: info.Bytes_acked - min(info.Bytes_acked, 1)} // without the SYN
			v.Replies = &flowtable.Traffic{Packets: uint64(info.Segs_in), Bytes: info.Bytes_received}
		}
		names.describe(&v, dest.Service)
		fn(v)
		if dest.Many != 0 {
			many[cookie] = s.Local
		}
	}
	if len(many) == 0 {
		return nil
	}
	return i.furtherPeers(many, names, fn)
}

// furtherPeers lists what unconnected UDP sockets send to beside their first peers.
func (i *Inspector) furtherPeers(clients map[uint64]netip.AddrPort, names *serviceNames, fn func(FlowView)) error {
	m := i.Maps["tdm_udp_peer"]
	if m == nil {
		return nil
	}
	var key lbmap.UDPPeerKey
	var peer lbmap.UDPPeer
	entries := m.Iterate()
	for entries.Next(&key, &peer) {
		client, ok := clients[key.Cookie]
		if !ok {
			continue
		}
		v := FlowView{
			Protocol: proxier.UDP.String(), At: AtSocket, Cookie: key.Cookie, Client: client, State: unconnected,
			Frontend: lbmap.ToAddrPort(peer.Vip, peer.VipPort), Backend: lbmap.ToAddrPort(key.Addr, key.Port),
		}
		names.describe(&v, peer.Service)
		fn(v)
	}
	if err := entries.Err(); err != nil {
		return fmt.Errorf("read the peers of UDP sockets: %w", err)
	}
	return nil
}

const unconnected = "unconnected"

func socketState(s *sockdiag.Socket, dest *lbmap.SocketDest) string {
	switch {
	case proxier.Protocol(dest.Proto) != proxier.TCP && dest.Connected == 0:
		return unconnected
	case proxier.Protocol(dest.Proto) != proxier.TCP:
		return "connected"
	}
	switch s.State {
	case sockdiag.SynSent:
		return flowtable.Opening.String()
	case sockdiag.Established:
		return flowtable.Established.String()
	case sockdiag.Close, sockdiag.TimeWait:
		return flowtable.Closed.String()
	}
	return flowtable.Closing.String()
}

// tcpStates are the states of those sockets that are TCP's, by their cookies, in the network namespaces that are
// found.
func tcpStates(ctx context.Context, procRoot string, sockets sockdiag.StorageValues) (map[uint64]*unix.TCPInfo, error) {
	states := map[uint64]*unix.TCPInfo{}
	filter := sockdiag.Filter{Protocol: unix.IPPROTO_TCP, Info: true}
	err := sockdiag.ForEachNetNS(ctx, procRoot, func(sockdiag.NetNS) error {
		_, _, err := sockdiag.Dump(ctx, filter, func(s sockdiag.Socket) bool {
			if _, ok := sockets[s.Cookie]; ok && s.TCP != nil {
				states[s.Cookie] = s.TCP
			}
			return false
		})
		return err
	})
	if err != nil && ctx.Err() == nil { // columns of what cannot be opened stay empty
		klog.FromContext(ctx).V(2).Info("Cannot read all TCP sockets", "err", err)
	}
	return states, ctx.Err()
}
