// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/probepacket"
)

var (
	// errNotProbed says that programs could not be tried.
	errNotProbed = errors.New("the programs cannot be tried")
	// errNotRouted says that no program can lead a packet to some endpoint.
	errNotRouted = errors.New("this host does not route it")
)

// Probe has the program on an uplink handle what a client outside would send first to a frontend: to its address, or to this one of the node
// for a frontend at all of them. It returns the endpoint that would get the packet, and an error if none would. Nothing is sent.
//
// Without endpoint and error, nothing was tried: programs or maps are being written, which it does not wait for; the frontend waits to be
// written or is served by others, has no endpoint or admits no probe; the kernel cannot run the program, or does not route to an endpoint.
func (t *Tier) Probe(uplink string, d *proxier.Decision, f *proxier.Frontend, node netip.Addr) (to netip.AddrPort, err error) {
	if !t.mu.TryLock() { // maps do not grow meanwhile
		return to, nil
	}
	defer t.mu.Unlock()
	on := slices.IndexFunc(t.uplinks, func(u devices.Device) bool { return u.Name == uplink })
	if on < 0 {
		return to, nil
	}
	t.writer.WhileServed(d.Index(), f, node, func(d *proxier.Decision, f *proxier.Frontend) {
		if p, ok := firstPacket(d, f, node); ok {
			to, err = t.lead(t.uplinks[on], d, f, &p)
		}
	})
	if errors.Is(err, errNotProbed) || errors.Is(err, errNotRouted) {
		err = nil
	}
	return to, err
}

// probe has the programs on some uplinks, or all if none is named, handle the first packet of a client outside to a frontend that has
// endpoints. It returns why no endpoint would get it; nil if one would. Programs on devices without a link-layer header cannot be tried, nor
// can any if the kernel refuses: errNotProbed.
func (t *Tier) probe(d *proxier.Decision, f *proxier.Frontend, uplinks []string) error {
	p, ok := firstPacket(d, f, f.Addr.Addr())
	if !ok {
		return nil // clients are refused
	}
	t.mu.Lock() // maps do not grow meanwhile; gen is acquired before mu, not after it
	defer t.mu.Unlock()
	tried := false
	for _, u := range t.uplinks {
		if len(uplinks) > 0 && !slices.Contains(uplinks, u.Name) {
			continue
		}
		if _, err := t.lead(u, d, f, &p); err != nil {
			return fmt.Errorf("uplink %s: %w", u.Name, err)
		}
		tried = true
	}
	if !tried {
		return fmt.Errorf("%w: no uplink has any", errNotProbed)
	}
	return nil
}

// firstPacket is the first one of a client outside to a frontend; false if no client is admitted, or there is no endpoint. A frontend at all
// addresses of the node gets it at this one.
func firstPacket(d *proxier.Decision, f *proxier.Frontend, node netip.Addr) (p probepacket.Packet, ok bool) {
	at := f.Addr
	if f.Kind.Wildcard() {
		at = netip.AddrPortFrom(node, at.Port())
	}
	client, admitted := probepacket.Client(at.Addr().Is6(), f.Filtered, f.Ranges)
	p = probepacket.Packet{Protocol: inet.Protocol(d.Name.Protocol), From: client, To: at, Flags: probepacket.SYN}
	return p, admitted && d.Size(f.Routes[proxier.FromOutside].Set) > 0
}

// lead has the program on a device handle a packet, and returns the endpoint that gets it. A connection that the packet begins is reset.
// It is called with mu held.
func (t *Tier) lead(on devices.Device, d *proxier.Decision, f *proxier.Frontend, p *probepacket.Packet) (to netip.AddrPort, err error) {
	out, err := t.try(on, p)
	if err != nil {
		return to, err
	}
	to, ok := probepacket.Destination(out)
	// What an endpoint gets is told by its address, and its port unless it is in another packet.
	if !ok || !slices.ContainsFunc(d.Backends, func(b proxier.Backend) bool { return b.Addr == to || to.Port() == 0 && b.Addr.Addr() == to.Addr() }) {
		if err := t.routes(on, p, d, f.Routes[proxier.FromOutside].Set); err != nil {
			return netip.AddrPort{}, fmt.Errorf("its program does not lead a packet from %s to an endpoint: %w", p.From, err)
		}
		return netip.AddrPort{}, fmt.Errorf("its program does not lead a packet from %s to an endpoint", p.From)
	}
	if p.Protocol == inet.TCP { // otherwise it would count as a client that got no answer
		reset := *p
		reset.Flags = probepacket.RST
		if _, err := t.try(on, &reset); err != nil {
			return netip.AddrPort{}, err
		}
	}
	return to, nil
}

// routes returns an error if the kernel does not route what comes in by a device to some endpoint of a set: its node is gone, the device does not
// forward, or a rule says so. Programs can do nothing about that, and netfilter could not either.
func (t *Tier) routes(on devices.Device, p *probepacket.Packet, d *proxier.Decision, set proxier.Set) error {
	return t.netns.Do(func() error {
		for i := range d.Backends {
			b := &d.Backends[i]
			if !b.In(set) {
				continue
			}
			to := b.Addr.Addr()
			opts := &netlink.RouteGetOptions{IifIndex: on.Index, SrcAddr: p.From.Addr().AsSlice()}
			_, err := netlink.RouteGetWithOptions(to.AsSlice(), opts)
			// Other errors are of the client's address, as to which programs do not look for a route.
			if errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EACCES) {
				return fmt.Errorf("%w: endpoint %s: %w", errNotRouted, to, err)
			}
		}
		return nil
	})
}

// try has the program on a device handle a packet, and returns what becomes of it. A dropped packet stays what it was.
func (t *Tier) try(on devices.Device, p *probepacket.Packet) (out []byte, err error) {
	variant, served := t.devices.Served[on.Index]
	programs := t.devices.Loaded[variant]
	if !served || programs == nil || variant.L3 {
		return nil, fmt.Errorf("%w: none is attached that takes Ethernet frames", errNotProbed)
	}
	err = t.netns.Do(func() error {
		device, err := net.InterfaceByIndex(on.Index)
		if err != nil { // it may just have gone
			return fmt.Errorf("%w: %w", errNotProbed, err)
		}
		if len(device.HardwareAddr) == 0 {
			device.HardwareAddr = make(net.HardwareAddr, 6)
		}
		opts := ciliumebpf.RunOptions{Data: p.Frame(device.HardwareAddr), DataOut: make([]byte, 256), Context: contextOf(on.Index)}
		if _, err := programs[ingress].Run(&opts); err != nil {
			return fmt.Errorf("%w: %w", errNotProbed, err)
		}
		out = opts.DataOut
		return nil
	})
	return out, err
}

// ingress is the place of the program for packets that come in.
var ingress = slices.IndexFunc(datapath.PacketHooks[:], func(h datapath.PacketHook) bool { return h.Direction == tc.Ingress })

// contextOf is a struct __sk_buff of linux/bpf.h of a packet that came in by a device.
func contextOf(device int) []byte {
	const size, ifindex = 192, 40 // bytes
	c := make([]byte, size)
	binary.NativeEndian.PutUint32(c[ifindex:], uint32(device))
	return c
}
