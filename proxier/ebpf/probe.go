// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"errors"
	"fmt"
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

// errNotProbed says that programs could not be tried.
var errNotProbed = errors.New("the programs cannot be tried")

// notForwardedError says that a packet from a client got to no endpoint.
type notForwardedError struct{ client netip.AddrPort }

func (e notForwardedError) Error() string {
	return fmt.Sprintf("its program does not forward a packet from %s to an endpoint", e.client)
}

// Probe has the program on an uplink handle what a client outside would send first to a frontend: to its address, or to this one of the node
// for a frontend at all of them. It returns the endpoint that would get the packet, and an error if none would. Nothing is sent.
//
// Without endpoint and error, nothing was tried: programs or maps are being written, which it does not wait for; the frontend waits to be
// written or is served by others, has no endpoint or admits no probe; the kernel cannot run the program, or does not route to an endpoint.
func (t *Tier) Probe(uplink string, d *proxier.Decision, f *proxier.Frontend, node netip.Addr) (to netip.AddrPort, err error) {
	if !t.mu.TryLock() { // maps do not grow meanwhile
		return to, nil
	}
	isRouted := func() bool { return true }
	if on := slices.IndexFunc(t.uplinks, func(u devices.Device) bool { return u.Name == uplink }); on >= 0 {
		u := t.uplinks[on]
		t.writer.WhileServed(d.Index(), f, node, func(d *proxier.Decision, f *proxier.Frontend) {
			if p, ok := firstPacket(d, f, node); ok {
				to, err = t.forward(u, d, &p)
				isRouted = func() bool { return t.isRouted(u, p.From.Addr(), d, f.Routes[proxier.FromOutside].Set) }
			}
		})
	}
	t.mu.Unlock()
	var refused notForwardedError
	if errors.Is(err, errNotProbed) || errors.As(err, &refused) && !isRouted() {
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
		if _, err := t.forward(u, d, &p); err != nil {
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

// forward has the program on a device handle a packet, and returns the endpoint that gets it. A connection that the packet begins is reset.
// It is called with mu held.
func (t *Tier) forward(on devices.Device, d *proxier.Decision, p *probepacket.Packet) (to netip.AddrPort, err error) {
	out, err := t.run(on, p)
	if err != nil {
		return to, err
	}
	to, ok := probepacket.Destination(out)
	// What an endpoint gets is told by its address, and its port unless it is in another packet.
	if !ok || !slices.ContainsFunc(d.Backends, func(b proxier.Backend) bool { return b.Addr == to || to.Port() == 0 && b.Addr.Addr() == to.Addr() }) {
		return netip.AddrPort{}, notForwardedError{p.From}
	}
	if p.Protocol == inet.TCP { // otherwise it would count as a client that got no answer
		reset := *p
		reset.Flags = probepacket.RST
		if _, err := t.run(on, &reset); err != nil {
			return netip.AddrPort{}, err
		}
	}
	return to, nil
}

// isRouted reports whether the kernel routes what a client sends in by a device to all endpoints of a set. If not, programs can do nothing
// about it, and netfilter could not either: the endpoint's node is gone, the device does not forward, or a rule says so. It asks the kernel
// for each endpoint.
func (t *Tier) isRouted(by devices.Device, client netip.Addr, d *proxier.Decision, set proxier.Set) bool {
	return t.netns.Do(func() error {
		for i := range d.Backends {
			b := &d.Backends[i]
			if !b.In(set) {
				continue
			}
			to := b.Addr.Addr().AsSlice()
			_, err := netlink.RouteGetWithOptions(to, &netlink.RouteGetOptions{IifIndex: by.Index, SrcAddr: client.AsSlice()})
			if errors.Is(err, unix.EINVAL) {
				// A blackhole, or the client's address, for which programs do not look for a route: without that, only the former.
				if _, err = netlink.RouteGet(to); !errors.Is(err, unix.EINVAL) {
					continue
				}
			}
			if isUnroutable(err) {
				return err
			}
		}
		return nil
	}) == nil
}

// isUnroutable reports whether an error of the kernel says that there is no route: none at all, or one of type unreachable, prohibit or
// blackhole.
func isUnroutable(err error) bool {
	return slices.ContainsFunc([]error{unix.EHOSTUNREACH, unix.ENETUNREACH, unix.EACCES, unix.EINVAL}, func(e error) bool { return errors.Is(err, e) })
}

// run has the program on a device handle a packet, and returns what it makes of it. A dropped packet stays what it was.
func (t *Tier) run(on devices.Device, p *probepacket.Packet) (out []byte, err error) {
	variant, served := t.devices.Served[on.Index]
	programs := t.devices.Loaded[variant]
	if !served || programs == nil || variant.L3 {
		return nil, fmt.Errorf("%w: none is attached that takes Ethernet frames", errNotProbed)
	}
	err = t.netns.Do(func() error {
		opts := ciliumebpf.RunOptions{Data: p.Frame(on.MAC[:]), DataOut: make([]byte, 256), Context: contextOf(on.Index)}
		if _, err := programs[ingress].Run(&opts); err != nil { // also if the device has just gone
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
