// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/successor"
)

// Status is the state of the datapath as a whole.
type Status struct {
	Cgroup string `json:"cgroup"`
	Layout uint32 `json:"layout"`
	// Running says that a process holds the lock of the writer.
	Running bool `json:"running"`
	// YieldedTo is another kube-proxy, to which the programs leave new connections; null if
	// they serve them.
	YieldedTo *successor.Yield `json:"yieldedTo"`
	// LastChange of anything in the tables; null if there was none.
	LastChange *time.Time `json:"lastChange"`
	// Unplaced counts service ports that do not fit and are not fully programmed.
	Unplaced int             `json:"unplaced"`
	Programs []ProgramStatus `json:"programs"`
	// MissingHooks have no program of the proxy: the kernel lacks the hook, or the
	// program was detached.
	MissingHooks []string `json:"missingHooks"`
	// Devices of this network namespace with programs of the proxy.
	Devices []DeviceStatus `json:"devices"`
	// Packets of Services on devices, by verdict.
	Packets []lbmap.PacketCount `json:"packets"`
	Maps    []MapStatus         `json:"maps"`
	// MapBytesLimit is how much memory all maps together may take when they grow; 0 for any number.
	MapBytesLimit uint64 `json:"mapBytesLimit"`
}

// DeviceStatus is one program on one device.
type DeviceStatus struct {
	Device    string `json:"device"`
	Index     int    `json:"index"`
	Direction string `json:"direction"`
	Method    string `json:"method"`
	Program   string `json:"program"`
	ID        uint32 `json:"id"`
}

// ProgramStatus is one attached program.
type ProgramStatus struct {
	Hook     string    `json:"hook"`
	Name     string    `json:"name"`
	ID       uint32    `json:"id"`
	Tag      string    `json:"tag"`
	LoadedAt time.Time `json:"loadedAt"`
}

// MapStatus is one map of the programs.
type MapStatus struct {
	Name string `json:"name"`
	ID   uint32 `json:"id"`
	Type string `json:"type"`
	// Used entries; null where they cannot be counted from outside.
	Used *int `json:"used"`
	// Max is how many entries can be used: id 0 stands for none.
	Max int `json:"max"`
	// Limit is what Max may become, if the map grows.
	Limit int `json:"limit"`
	// MemoryBytes is null where the kernel does not report it.
	MemoryBytes *uint64 `json:"memoryBytes"`
}

// Status reads the state of programs and maps.
func (i *Inspector) Status() (Status, error) {
	meta := copyWords(i.tables.Meta)
	s := Status{
		Cgroup: i.cgroup.Name(), Layout: meta.Layout, MapBytesLimit: meta.BytesLimit, Unplaced: i.Unplaced(),
		Programs: []ProgramStatus{}, MissingHooks: i.missingHooks(), Maps: []MapStatus{},
	}
	if ns := int64(atomic.LoadUint64(&i.tables.Meta.ChangedUnixNs)); ns > 0 {
		at := time.Unix(0, ns).UTC()
		s.LastChange = &at
	}
	var err error
	if s.Running, err = datapath.IsLocked(i.cgroup); err != nil {
		return s, err
	}
	if s.YieldedTo, err = i.yieldedTo(); err != nil {
		return s, err
	}
	boot, err := bootTime()
	if err != nil {
		return s, err
	}
	for _, h := range datapath.Hooks {
		for _, a := range i.attached {
			if a.Hook != h.Attach {
				continue
			}
			p, err := programStatus(a, boot)
			if err != nil {
				return s, err
			}
			p.Hook = hookName(h.Program)
			s.Programs = append(s.Programs, p)
		}
	}
	if s.Devices, err = deviceStatus(); err != nil {
		return s, err
	}
	s.Packets = []lbmap.PacketCount{}
	if m := i.Maps["tdm_reason"]; m != nil {
		if s.Packets, err = lbmap.ReadPacketCounts(m); err != nil {
			return s, err
		}
	}
	for name, m := range i.Maps {
		about, err := i.mapStatus(name, m, &meta)
		if err != nil {
			return s, err
		}
		s.Maps = append(s.Maps, about)
	}
	slices.SortFunc(s.Maps, func(a, b MapStatus) int { return strings.Compare(a.Name, b.Name) })
	return s, nil
}

// deviceStatus describes the programs of the proxy on all devices.
func deviceStatus() ([]DeviceStatus, error) {
	list := []DeviceStatus{}
	err := withDevicePrograms(func(found []deviceProgram) error {
		for _, p := range found {
			d := DeviceStatus{Device: p.device.Name, Index: p.device.Index, Direction: p.direction.String(), Method: p.Method.String()}
			if info, err := p.Program.Info(); err == nil {
				id, _ := info.ID()
				d.Program, d.ID = info.Name, uint32(id)
			}
			list = append(list, d)
		}
		return nil
	})
	return list, err
}

// Unplaced counts service ports that do not fit, as Status.Unplaced does.
func (i *Inspector) Unplaced() int { return int(atomic.LoadUint32(&i.tables.Meta.Unplaced)) }

// yieldedTo is another kube-proxy, to which the programs leave new connections.
func (i *Inspector) yieldedTo() (*successor.Yield, error) {
	var value lbmap.Successor
	m := i.Maps[successor.MapName]
	if m == nil {
		return nil, fmt.Errorf("%w: no program uses map %s", lbmap.ErrLayout, successor.MapName)
	}
	if err := m.Lookup(uint32(0), &value); err != nil {
		return nil, fmt.Errorf("read map %s: %w", successor.MapName, err)
	}
	if y, yielded := successor.ReadYield(&value); yielded {
		return &y, nil
	}
	return nil, nil
}

// bootTime is the moment from which the kernel counts load times.
func bootTime() (time.Time, error) {
	var since unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &since); err != nil {
		return time.Time{}, fmt.Errorf("read the boot time: %w", err)
	}
	return time.Now().Add(-time.Duration(since.Nano())), nil
}

// missingHooks are those without a program of the proxy, except those that are
// not always needed.
func (i *Inspector) missingHooks() []string {
	missing := []string{}
	for _, h := range datapath.Hooks[:datapath.SignalHook] {
		if !slices.ContainsFunc(i.attached, func(a datapath.Attachment) bool { return a.Hook == h.Attach }) {
			missing = append(missing, hookName(h.Program))
		}
	}
	return missing
}

// hookName is the name of the hook in bpf/sock.bpf.c.
func hookName(program string) string { return strings.TrimPrefix(program, lbmap.NamePrefix) }

func programStatus(a datapath.Attachment, boot time.Time) (ProgramStatus, error) {
	info, err := a.Program.Info()
	if err != nil {
		return ProgramStatus{}, fmt.Errorf("inspect the program of %s: %w", a.Hook, err)
	}
	id, _ := info.ID()
	p := ProgramStatus{Name: info.Name, ID: uint32(id), Tag: info.Tag}
	if loaded, ok := info.LoadTime(); ok {
		p.LoadedAt = boot.Add(loaded).UTC().Truncate(time.Second)
	}
	return p, nil
}

// limitOf is the number of elements that a map may have when it has grown; 0 if it does not grow.
func limitOf(name string, meta *lbmap.Meta) int {
	switch name {
	case "tdm_frontend":
		return int(meta.FrontendsLimit)
	case "tdm_service", "tdm_svc_stats":
		return int(meta.ServicesLimit)
	case "tdm_set":
		return int(meta.ServicesLimit * lbmap.SetsPerService)
	case "tdm_backend", "tdm_be_stats":
		return int(meta.BackendsLimit)
	case "tdm_slot":
		return int(meta.SlotsLimit)
	case "tdm_affinity":
		return int(meta.AffinityLimit)
	case "tdm_udp_peer":
		return int(meta.UdpPeersLimit)
	case "tdm_flow":
		return int(meta.FlowsLimit)
	}
	return 0
}

func (i *Inspector) mapStatus(name string, m *ciliumebpf.Map, meta *lbmap.Meta) (MapStatus, error) {
	info, err := m.Info()
	if err != nil {
		return MapStatus{}, fmt.Errorf("inspect map %s: %w", name, err)
	}
	id, _ := info.ID()
	size := int(info.MaxEntries)
	if name == "tdm_slot" {
		size *= lbmap.SlotsPerElement
	}
	s := MapStatus{Name: name, ID: uint32(id), Type: info.Type.String(), Max: size}
	if memory, ok := info.Memlock(); ok {
		s.MemoryBytes = &memory
	}
	limit := limitOf(name, meta)
	used, known := 0, true
	switch name {
	case "tdm_meta", successor.MapName:
		used = 1
	case "tdm_node":
		used, s.Max = 1, 1 // the other one is for the next change
	case "tdm_set":
		used, s.Max = int(meta.ServicesUsed*lbmap.SetsPerService), s.Max-int(lbmap.SetsPerService)
	case "tdm_slot":
		used = int(meta.SlotsUsed)
	case "tdm_backend", "tdm_be_stats":
		used, s.Max = int(meta.BackendsUsed), s.Max-1
	case "tdm_service", "tdm_svc_stats":
		used, s.Max = int(meta.ServicesUsed), s.Max-1
	case "tdm_frontend":
		used, err = lbmap.CountEntries[lbmap.FrontendKey, lbmap.FrontendValue](m)
	case "tdm_flow":
		used, err = i.flowsUsed()
		s.Max-- // id 0 is none
	case "tdm_flow_entry":
		used, err = i.flowsUsed()
		used, s.Max, s.Limit = 2*used, flowtable.EntryLimit(m), 2*int(meta.FlowsLimit)
	case "tdm_vip":
		used, err = lbmap.CountEntries[[4]uint32, uint8](m)
	case "tdm_target":
		used, err = lbmap.CountEntries[lbmap.TargetKey, uint64](m)
	case "tdm_uplink":
		used, err = lbmap.CountEntries[uint32, lbmap.Uplink](m)
	case "tdm_range":
		used, err = lbmap.CountEntries[lbmap.RangeKey, uint8](m)
	case "tdm_local":
		used, err = lbmap.CountEntries[[4]uint32, uint32](m)
	case "tdm_affinity":
		used, err = lbmap.CountEntries[lbmap.AffinityKey, lbmap.Affinity](m)
	case "tdm_udp_peer":
		used, err = lbmap.CountEntries[lbmap.UDPPeerKey, lbmap.UDPPeer](m)
	case "tdm_optout":
		used, err = lbmap.CountEntries[uint64, uint8](m)
	default:
		known = false // entries belong to the sockets, and cannot be counted
	}
	if err != nil {
		return s, fmt.Errorf("count the entries of %s: %w", name, err)
	}
	// It is less than the map's size will be by as much as Max is.
	s.Limit = max(s.Limit, s.Max, limit-size+s.Max)
	if known {
		s.Used = &used
	}
	return s, nil
}

// flowsUsed counts the flows there are.
func (i *Inspector) flowsUsed() (int, error) {
	for _, name := range []string{"tdm_flow", "tdm_flow_free"} {
		if i.Maps[name] == nil {
			return 0, fmt.Errorf("%w: no program uses map %s", lbmap.ErrLayout, name)
		}
	}
	return flowtable.UsedIn(i.Maps)
}
