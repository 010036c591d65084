// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package monitor reports packets and connections of Services that fail, and flows that are evicted. It attaches programs
// to the functions that the proxy's programs call for that, and so costs nothing unless it runs.
package monitor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"time"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// ErrNotSupported says that the kernel does not let programs be attached to BPF programs: it takes
// bpf_get_func_arg (Linux 5.17), trampolines (Linux 6.0 on arm64) and the JIT compiler. Kernels that are built
// without tracing, as for small virtual machines, and security modules refuse it as well.
var ErrNotSupported = errors.New("the kernel does not let BPF programs be traced")

// Failure is a packet or connection that was not served, or a flow that was evicted.
type Failure struct {
	Time     time.Time
	Protocol proxier.Protocol
	// Client is not known at a socket, which may not be bound yet.
	Client, Frontend netip.AddrPort
	// Reason is one of lbmap.ReasonNames, or SocketReasons.
	Reason string
	// Process and PID are of the socket; empty for packets.
	Process string
	PID     int
}

// Reasons at sockets.
const (
	RejectedNoBackend = "rejected_no_backend"
	// DroppedPolicy is also that of source ranges: sockets are not told apart.
	DroppedPolicy = "dropped_policy_or_source_range"
	DroppedRaced  = "dropped_raced"
)

// Monitor has the programs.
type Monitor struct {
	spec   *ciliumebpf.CollectionSpec
	maps   map[string]*ciliumebpf.Map
	reader *ringbuf.Reader
	links  map[ciliumebpf.ProgramID][]link.Link
	booted time.Time
}

// New makes a monitor that is attached to nothing. It reports up to so many failures per second and CPU, and
// counts the rest.
func New(perSecond uint32) (_ *Monitor, err error) {
	m := &Monitor{maps: map[string]*ciliumebpf.Map{}, links: map[ciliumebpf.ProgramID][]link.Link{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Close())
		}
	}()
	if m.spec, err = lbmap.MonitorSpec(); err != nil {
		return nil, err
	}
	if err := m.spec.Variables["rate_limit"].Set(perSecond); err != nil {
		return nil, fmt.Errorf("set the rate of the monitor: %w", err)
	}
	for _, name := range []string{"tdm_failures", "tdm_failure_rate"} {
		if m.maps[name], err = ciliumebpf.NewMap(m.spec.Maps[name]); err != nil {
			return nil, fmt.Errorf("create map %s: %w", name, err)
		}
	}
	if m.reader, err = ringbuf.NewReader(m.maps["tdm_failures"]); err != nil {
		return nil, fmt.Errorf("read the ring buffer: %w", err)
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return nil, os.NewSyscallError("clock_gettime", err)
	}
	m.booted = time.Now().Add(-time.Duration(now.Nano()))
	return m, nil
}

// functions are those that programs attach to, by the names of the monitor's programs.
var functions = map[string]string{"tdm_packet_fail": "packet_failed", "tdm_sock_fail": "connection_failed"}

// Follow attaches to programs that it is not attached to yet, and detaches from others. Programs without such
// functions are left alone. It returns how many it is attached to.
func (m *Monitor) Follow(programs []*ciliumebpf.Program) (attached int, err error) {
	wanted := map[ciliumebpf.ProgramID]bool{}
	for _, p := range programs {
		info, err := p.Info()
		if err != nil {
			return 0, fmt.Errorf("inspect a program: %w", err)
		}
		id, ok := info.ID()
		if !ok || wanted[id] {
			continue
		}
		wanted[id] = true
		if _, known := m.links[id]; known {
			continue
		}
		links, err := m.attach(p, info)
		if err != nil {
			return 0, fmt.Errorf("attach to program %s: %w", info.Name, err)
		}
		m.links[id] = links
	}
	for id, links := range m.links {
		if !wanted[id] {
			err = errors.Join(err, closeAll(links))
			delete(m.links, id)
			continue
		}
		attached += len(links)
	}
	return attached, err
}

func (m *Monitor) attach(target *ciliumebpf.Program, info *ciliumebpf.ProgramInfo) (links []link.Link, err error) {
	present, err := info.FuncInfos()
	if err != nil {
		return nil, err
	}
	has := map[string]bool{}
	for _, f := range present {
		has[f.Func.Name] = true
	}
	for name, function := range functions {
		if !has[function] {
			continue
		}
		spec := m.spec.Copy()
		maps.DeleteFunc(spec.Programs, func(other string, _ *ciliumebpf.ProgramSpec) bool { return other != name })
		spec.Programs[name].AttachTarget, spec.Programs[name].AttachTo = target, function
		collection, err := ciliumebpf.NewCollectionWithOptions(spec, ciliumebpf.CollectionOptions{MapReplacements: m.maps})
		if err != nil {
			// Who may open programs by id has the privilege; EPERM is the kernel's.
			err = fmt.Errorf("%w: %w", ErrNotSupported, err)
			return nil, errors.Join(err, closeAll(links))
		}
		l, err := link.AttachTracing(link.TracingOptions{Program: collection.Programs[name]})
		collection.Close()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("%w: %w", ErrNotSupported, err), closeAll(links))
		}
		links = append(links, l)
	}
	return links, nil
}

func closeAll(links []link.Link) (err error) {
	for _, l := range links {
		err = errors.Join(err, l.Close())
	}
	return err
}

// Next waits for a failure until the deadline, and returns os.ErrDeadlineExceeded then.
func (m *Monitor) Next(ctx context.Context, deadline time.Time) (f Failure, err error) {
	if ctx.Err() != nil {
		return f, ctx.Err()
	}
	m.reader.SetDeadline(deadline)
	record, err := m.reader.Read()
	if err != nil {
		return f, err
	}
	var raw lbmap.Failure
	if len(record.RawSample) < int(unsafe.Sizeof(raw)) {
		return f, fmt.Errorf("%w: a report of %d bytes", lbmap.ErrLayout, len(record.RawSample))
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&raw)), unsafe.Sizeof(raw)), record.RawSample)
	f = Failure{
		Time: m.booted.Add(time.Duration(raw.Time)), Protocol: proxier.Protocol(raw.Key.Proto), Frontend: lbmap.ToAddrPort(raw.Key.Dst, raw.Key.Dport),
		PID: int(raw.Pid),
	}
	if raw.Pid == 0 {
		f.Client, f.Reason = lbmap.ToAddrPort(raw.Key.Src, raw.Key.Sport), lbmap.ReasonName(raw.Code)
		return f, nil
	}
	comm := unsafe.Slice((*byte)(unsafe.Pointer(&raw.Comm)), len(raw.Comm))
	comm, _, _ = bytes.Cut(comm, []byte{0})
	f.Process = string(comm)
	switch raw.Code {
	case lbmap.SelectReject:
		f.Reason = RejectedNoBackend
	case lbmap.SelectDrop:
		f.Reason = DroppedPolicy
	default:
		f.Reason = DroppedRaced
	}
	return f, nil
}

// LeftOut counts failures that were not reported, as there were too many.
func (m *Monitor) LeftOut() (sum uint64, err error) {
	var perCPU []lbmap.FailureRate
	if err := m.maps["tdm_failure_rate"].Lookup(uint32(0), &perCPU); err != nil {
		return 0, fmt.Errorf("read how many failures were not reported: %w", err)
	}
	for i := range perCPU {
		sum += perCPU[i].LeftOut
	}
	return sum, nil
}

// Close detaches all programs.
func (m *Monitor) Close() (err error) {
	for _, links := range m.links {
		err = errors.Join(err, closeAll(links))
	}
	if m.reader != nil {
		err = errors.Join(err, m.reader.Close())
	}
	for _, one := range m.maps {
		if one != nil {
			err = errors.Join(err, one.Close())
		}
	}
	return err
}
