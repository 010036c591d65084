// SPDX-License-Identifier: Apache-2.0

package successor

import (
	"bytes"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// MapName is the map's.
const MapName = "tdm_successor"

// BeatInterval is how often an owner says that it is alive.
const BeatInterval = time.Second

// Ports are those that a kube-proxy listens on in the host's network namespace; 0 for none.
type Ports struct{ Health, Metrics uint16 }

// Yield says that the programs leave new connections to another kube-proxy.
type Yield struct {
	Since time.Time `json:"since"`
	// Process is the name of that kube-proxy's process, and PID its number in the initial pid
	// namespace.
	Process string `json:"process"`
	PID     uint32 `json:"pid"`
}

// Map is map tdm_successor, in memory.
type Map struct {
	value  *lbmap.Successor
	memory []byte
}

// Open maps the memory of a map, which may be closed afterwards.
func Open(m *ciliumebpf.Map) (*Map, error) {
	if m == nil {
		return nil, fmt.Errorf("%w: no program uses map %s", lbmap.ErrLayout, MapName)
	}
	if size := m.ValueSize(); size != uint32(unsafe.Sizeof(lbmap.Successor{})) {
		return nil, fmt.Errorf("%w: map %s has values of %d bytes", lbmap.ErrLayout, MapName, size)
	}
	values, memory, err := lbmap.Memory[lbmap.Successor](m)
	if err != nil {
		return nil, err
	}
	return &Map{&values[0], memory}, nil
}

// Close unmaps the memory. The map stays in the kernel.
func (m *Map) Close() error {
	if m.memory == nil {
		return nil
	}
	memory := m.memory
	m.value, m.memory = nil, nil
	return unix.Munmap(memory)
}

// Own makes this process the owner: sockets that it binds from now on are no successor's. self
// is its number in the initial pid namespace. A grace of 0 means that the programs never yield.
func (m *Map) Own(self uint32, ports Ports, grace time.Duration) {
	m.Claim(self)
	m.value.Holders[lbmap.PortHealth].Port = ports.Health
	m.value.Holders[lbmap.PortMetrics].Port = ports.Metrics
	atomic.StoreUint64(&m.value.GraceNs, uint64(max(grace, 0)))
}

// Claim is Own with the ports and the grace that the map has.
func (m *Map) Claim(self uint32) {
	m.Beat()
	atomic.StoreUint32(&m.value.OwnerTgid, self)
}

// Await says that another kube-proxy listens at these addresses. Programs see who binds ports, but not who
// did before they were attached. Once this owner is gone for the grace period they yield to it, if servers
// still listen on all ports of a kube-proxy.
func (m *Map) Await(listeners []netip.AddrPort) {
	held := [lbmap.SuccessorPorts]*netip.AddrPort{}
	for i := range m.value.Holders {
		for l := range listeners {
			if listeners[l].Port() == m.value.Holders[i].Port {
				held[i] = &listeners[l]
			}
		}
		if held[i] == nil && m.value.Holders[i].Port != 0 {
			return
		}
	}
	known, seen := false, false
	for i, l := range held {
		if l != nil {
			m.value.Holders[i].Addr = lbmap.FromAddr(l.Addr())
			known = true
			seen = seen || m.value.Holders[i].Tgid != 0
		}
	}
	if !known {
		return
	}
	if !seen {
		// What programs saw was another process.
		m.value.Tgid, m.value.Comm = 0, [16]uint8{}
	}
	atomic.CompareAndSwapUint64(&m.value.DeadlineNs, 0, monotonic())
}

// Beat says that the owner is alive.
func (m *Map) Beat() { atomic.StoreUint64(&m.value.OwnerSeenNs, monotonic()) }

// Yielded reports whether the programs leave new connections to another kube-proxy.
func (m *Map) Yielded() (y Yield, yielded bool) { return ReadYield(m.value) }

// TakeBack has the programs accept new connections again.
func (m *Map) TakeBack() { atomic.StoreUint64(&m.value.YieldedNs, 0) }

// ReadYield is Yielded of a value of the map.
func ReadYield(s *lbmap.Successor) (y Yield, yielded bool) {
	since := atomic.LoadUint64(&s.YieldedNs)
	if since == 0 {
		return Yield{}, false
	}
	comm, _, _ := bytes.Cut(s.Comm[:], []byte{0})
	return Yield{Since: time.Now().Add(-time.Duration(monotonic() - since)).UTC().Truncate(time.Second), Process: string(comm), PID: s.Tgid}, true
}

// monotonic is CLOCK_MONOTONIC in nanoseconds.
func monotonic() uint64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // fails for unknown clocks
	return uint64(now.Nano())
}
