// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/devices"
	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/probepacket"
)

// errNotProbed says that programs could not be tried.
var errNotProbed = errors.New("the programs cannot be tried")

// probes are the frontends at which a probe was led to an endpoint, by the programs that are attached now.
type probes struct {
	mu   sync.Mutex
	done map[probed]types.UID
}

// probed is a frontend of a Service, while the index of the decision is that of the Service.
type probed struct {
	index uint32
	at    netip.AddrPort
}

// reset is called when other programs are attached.
func (p *probes) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done = map[probed]types.UID{}
}

func (p *probes) has(d *proxier.Decision, f *proxier.Frontend) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	uid, ok := p.done[probed{d.Index(), f.Addr}]
	return ok && uid == d.UID
}

func (p *probes) set(d *proxier.Decision, f *proxier.Frontend, served bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if at := (probed{d.Index(), f.Addr}); served {
		p.done[at] = d.UID
	} else {
		delete(p.done, at)
	}
}

// Lacks is why clients outside whose packets come in by these uplinks, or any if there is none, are not served at a frontend; nil if they
// are. It looks at what is attached and in the maps, and once has the programs handle a packet, which the Service counts as a connection.
func (t *Tier) Lacks(d *proxier.Decision, f *proxier.Frontend, uplinks []string) (err error) {
	defer func() { t.probes.set(d, f, err == nil) }()
	for _, u := range t.Uplinks() {
		if u.Err != nil && (len(uplinks) == 0 || slices.Contains(uplinks, u.Name)) {
			return fmt.Errorf("uplink %s: %w", u.Name, u.Err)
		}
	}
	if err := t.writer.Lacks(d, f); err != nil || t.probes.has(d, f) {
		return err
	}
	err = t.probe(d, f, uplinks)
	if errors.Is(err, errNotProbed) {
		klog.Background().V(2).Info("Cannot probe a frontend; the maps of the programs have it", "servicePort", d.Name, "frontend", f.Addr, "reason", err.Error())
		return nil
	}
	return err
}

// probe has the programs on some uplinks, or all if none is named, handle what a client outside would send first to a frontend that has
// endpoints. It returns why no endpoint would get it; nil if one would. Nothing is sent. Programs on devices without a link-layer header
// cannot be tried, nor can any if the kernel refuses: errNotProbed.
func (t *Tier) probe(d *proxier.Decision, f *proxier.Frontend, uplinks []string) error {
	client, admitted := probepacket.Client(f.Addr.Addr().Is6(), f.Filtered, f.Ranges)
	if !admitted || d.Size(f.Routes[proxier.FromOutside].Set) == 0 {
		return nil // clients are refused
	}
	// What an endpoint gets is told by its address, and its port unless it is in another packet.
	isEndpoint := func(to netip.AddrPort) bool {
		return slices.ContainsFunc(d.Backends, func(b proxier.Backend) bool {
			return b.Addr == to || to.Port() == 0 && b.Addr.Addr() == to.Addr()
		})
	}
	p := probepacket.Packet{Protocol: inet.Protocol(d.Name.Protocol), From: client, To: f.Addr, Flags: probepacket.SYN}
	t.mu.Lock() // maps do not grow meanwhile; gen is acquired before mu, not after it
	defer t.mu.Unlock()
	tried := false
	for _, u := range t.uplinks {
		if len(uplinks) > 0 && !slices.Contains(uplinks, u.Name) {
			continue
		}
		out, err := t.try(u, &p)
		if err != nil {
			return fmt.Errorf("uplink %s: %w", u.Name, err)
		}
		tried = true
		if to, ok := probepacket.Destination(out); !ok || !isEndpoint(to) {
			return fmt.Errorf("uplink %s: its program does not lead a packet from %s to an endpoint", u.Name, client)
		}
		if p.Protocol == inet.TCP { // otherwise it would count as a client that got no answer
			reset := p
			reset.Flags = probepacket.RST
			if _, err := t.try(u, &reset); err != nil {
				return fmt.Errorf("uplink %s: %w", u.Name, err)
			}
		}
	}
	if !tried {
		return fmt.Errorf("%w: no uplink has any", errNotProbed)
	}
	return nil
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
		if err != nil {
			return err
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
