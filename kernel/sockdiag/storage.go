// SPDX-License-Identifier: Apache-2.0

//go:build linux

package sockdiag

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net/netip"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/loading"
)

// StorageValues are the sockets that have a value in a socket storage map, by their cookies. Inode and
// CgroupID are not known.
type StorageValues map[uint64]Socket

// StorageReader reads a whole socket storage map (BPF_MAP_TYPE_SK_STORAGE), for sockets
// of all network namespaces.
//
// inet_diag can report the values too, but for TCP only: for UDP, kernels up to 6.18 at
// least ignore the request. Therefore BPF iterators write them, which need Linux 5.12
// with BTF. The one over the map finds the sockets of all namespaces at once. Security
// modules may refuse it, since its programs could write to the map; those over the
// sockets of one namespace after the other do the same job then, in more time.
type StorageReader struct {
	programs  []storageProgram
	perNetNS  bool
	procRoot  string
	valueSize int
}

type storageProgram struct {
	prog *ciliumebpf.Program
	iter *link.Iter
}

// StorageOptions say which values a StorageReader reads.
type StorageOptions struct {
	// States is a set of 1<<state bits: only sockets in these states are read. Zero means all.
	States uint32
	// ProcRoot is where network namespaces are found if they have to be visited; /proc if it is empty.
	ProcRoot string
	// Protocols are the names of those whose sockets are visited where values cannot be read through the map; tcp
	// and udp if it is empty.
	Protocols []string
	// PerNetNS visits the namespaces even if the kernel permits the iterator over the map.
	PerNetNS bool
}

// NewStorageReader prepares to read the values of bound sockets in a map. Closing the
// reader does not close the map. It returns ErrStorageNotSupported if the kernel has no
// suitable iterator.
func NewStorageReader(m *ciliumebpf.Map, o StorageOptions) (_ *StorageReader, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("read socket storage: %w", err)
		}
	}()
	if m.Type() != ciliumebpf.SkStorage {
		return nil, fmt.Errorf("map is of type %s, not %s", m.Type(), ciliumebpf.SkStorage)
	}
	if o.States == 0 {
		o.States = math.MaxUint32
	}
	r := &StorageReader{valueSize: int(m.ValueSize()), procRoot: cmp.Or(o.ProcRoot, "/proc"), perNetNS: o.PerNetNS}
	if !o.PerNetNS {
		err := r.load("bpf_sk_storage_map", m, ofMap(), o)
		switch {
		case err == nil:
			return r, nil
		case !errors.Is(err, unix.EPERM):
			return nil, err
		}
		r.perNetNS = true
	}
	if len(o.Protocols) == 0 {
		o.Protocols = []string{"tcp", "udp"}
	}
	for _, target := range o.Protocols {
		if err := r.load(target, nil, ofSockets(m), o); err != nil {
			return nil, errors.Join(err, r.Close())
		}
	}
	return r, nil
}

// load makes a program that an iterator over the target runs.
func (r *StorageReader) load(target string, m *ciliumebpf.Map, pick asm.Instructions, o StorageOptions) error {
	const name = "sk_storage_dump"
	v6, err := addresses6()
	if err != nil {
		return fmt.Errorf("%w: iterator %s: %w", ErrStorageNotSupported, target, err)
	}
	collection, err := ciliumebpf.NewCollectionWithOptions(&ciliumebpf.CollectionSpec{Programs: map[string]*ciliumebpf.ProgramSpec{name: {
		Name:         name,
		Type:         ciliumebpf.Tracing,
		AttachType:   ciliumebpf.AttachTraceIter,
		AttachTo:     target,
		License:      "GPL", // bpf_seq_write is GPL-only
		Instructions: append(pick, dumpStorage(r.valueSize, o.States, v6)...),
	}}}, ciliumebpf.CollectionOptions{Cache: loading.KernelTypes()})
	if err != nil {
		if errors.Is(err, unix.EPERM) {
			return fmt.Errorf("iterator %s: %w", target, err)
		}
		// The kernel lacks the iterator, the helper or BTF.
		return fmt.Errorf("%w: iterator %s: %w", ErrStorageNotSupported, target, err)
	}
	defer collection.Close()
	p := storageProgram{prog: collection.DetachProgram(name)}
	if p.iter, err = link.AttachIter(link.IterOptions{Program: p.prog, Map: m}); err != nil {
		return errors.Join(err, p.prog.Close())
	}
	r.programs = append(r.programs, p)
	return nil
}

// Close frees the reader.
func (r *StorageReader) Close() error {
	var errs []error
	for _, p := range r.programs {
		errs = append(errs, p.iter.Close(), p.prog.Close())
	}
	return errors.Join(errs...)
}

// Read returns the values of all sockets that have one, or with an error those that it could read. Call it after the datapath
// stopped selecting the removed backends: a value that is written while Read runs may be
// missing.
func (r *StorageReader) Read(ctx context.Context) (StorageValues, error) {
	values := StorageValues{}
	here := func() error {
		for _, p := range r.programs {
			if err := p.read(ctx, r.valueSize, values); err != nil {
				return fmt.Errorf("read socket storage: %w", err)
			}
		}
		return nil
	}
	if !r.perNetNS {
		return values, here()
	}
	var unread []error
	err := ForEachNetNS(ctx, r.procRoot, func(NetNS) error {
		unread = append(unread, here())
		return nil
	})
	if errors.Is(err, fs.ErrPermission) {
		err = nil // those that cannot be opened have no sockets that could be closed
	}
	return values, errors.Join(append(unread, err)...)
}

// read adds the values that the iterator finds, which for sockets are those of the namespace of this thread.
func (p *storageProgram) read(ctx context.Context, valueSize int, values StorageValues) error {
	f, err := p.iter.Open()
	if err != nil {
		return err
	}
	defer f.Close()
	in := bufio.NewReaderSize(f, 64<<10)
	record := make([]byte, recordLen+valueSize)
	for ctx.Err() == nil {
		_, err := io.ReadFull(in, record)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		s := parseRecord(record)
		values[s.Cookie] = s
	}
	return ctx.Err()
}

// A record is what the program writes of a socket before its value: fields at these offsets, those of
// struct sock_common as they are there.
const (
	recordCookie = 0
	recordLocal6 = 8
	recordPeer6  = 24
	recordPeer4  = 40 // and the local address after it
	recordPort   = 48 // of the peer, and the socket's own after it, in host order
	recordFamily = 52 // and the state after it
	recordLen    = 56
)

func parseRecord(b []byte) Socket {
	s := Socket{
		Cookie: binary.NativeEndian.Uint64(b), Family: uint8(binary.NativeEndian.Uint16(b[recordFamily:])), State: b[recordFamily+2],
		Storage: append([]byte{}, b[recordLen:]...),
	}
	local, peer := b[recordPeer4+4:recordPort], b[recordPeer4:recordPeer4+4]
	if s.Family == unix.AF_INET6 {
		local, peer = b[recordLocal6:recordPeer6], b[recordPeer6:recordPeer4]
	}
	to := func(address []byte, port uint16) netip.AddrPort {
		a, _ := netip.AddrFromSlice(address) // of 4 or 16 bytes
		return netip.AddrPortFrom(a.Unmap(), port)
	}
	s.Local = to(local, binary.NativeEndian.Uint16(b[recordPort+2:]))
	s.Remote = to(peer, binary.BigEndian.Uint16(b[recordPort:]))
	return s
}

// The parts of programs that take the meta data, socket and value from the context of an iterator, into R6, R8 and R7. All
// contexts begin with struct bpf_iter_meta *meta, which begins with struct seq_file *seq.
const (
	iterMeta = 0
	metaSeq  = 0
)

// ofMap is for struct bpf_iter__bpf_sk_storage_map { meta, map, sk, value }.
func ofMap() asm.Instructions {
	const sk, value = 16, 24
	return asm.Instructions{
		asm.LoadMem(asm.R6, asm.R1, iterMeta, asm.DWord),
		asm.LoadMem(asm.R6, asm.R6, metaSeq, asm.DWord),
		asm.LoadMem(asm.R7, asm.R1, value, asm.DWord),
		asm.LoadMem(asm.R8, asm.R1, sk, asm.DWord),
		// Both are NULL in the last call, which marks the end.
		asm.JEq.Imm(asm.R8, 0, "out"),
		asm.JEq.Imm(asm.R7, 0, "out"),
	}
}

// ofSockets is for struct bpf_iter__tcp { meta, sk_common, … } and bpf_iter__udp { meta, udp_sk, … }.
func ofSockets(m *ciliumebpf.Map) asm.Instructions {
	const sk = 8
	return asm.Instructions{
		asm.LoadMem(asm.R6, asm.R1, iterMeta, asm.DWord),
		asm.LoadMem(asm.R6, asm.R6, metaSeq, asm.DWord),
		asm.LoadMem(asm.R8, asm.R1, sk, asm.DWord),
		asm.JEq.Imm(asm.R8, 0, "out"),

		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.Mov.Reg(asm.R2, asm.R8),
		asm.Mov.Imm(asm.R3, 0),
		asm.Mov.Imm(asm.R4, 0),
		asm.FnSkStorageGet.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Reg(asm.R7, asm.R0),
	}
}

// offsets6 are those of the IPv6 addresses in struct sock_common; 0 without IPv6.
type offsets6 struct{ local, peer int16 }

// addresses6 finds them: what is before them depends on the kernel's configuration.
func addresses6() (found offsets6, err error) {
	spec, err := loading.KernelTypes().Kernel()
	if err != nil {
		return found, err
	}
	var common *btf.Struct
	if err := spec.TypeByName("sock_common", &common); err != nil {
		return found, err
	}
	for _, m := range common.Members {
		switch m.Name {
		case "skc_v6_rcv_saddr":
			found.local = int16(m.Offset.Bytes())
		case "skc_v6_daddr":
			found.peer = int16(m.Offset.Bytes())
		}
	}
	return found, nil
}

// dumpStorage goes on with a socket and its value in the map: it writes a record of the
// socket and the value if the socket is in one of the states. A closed socket keeps its
// value for an RCU grace period, but has no port. If the output buffer is full, the kernel
// discards the output of this run, passes the rest to the reader, and runs the program again.
func dumpStorage(valueSize int, states uint32, v6 offsets6) asm.Instructions {
	// struct sock_common { addresses 8, hash 4, peer's port 2, own port 2, family
	// 2, state 1, … }: the same since long before BPF.
	const addresses, ports, port, family, state = 0, 12, 14, 16, 18
	program := asm.Instructions{
		asm.LoadMem(asm.R2, asm.R8, state, asm.Byte),
		asm.Mov.Imm32(asm.R3, int32(states)),
		asm.RSh.Reg32(asm.R3, asm.R2),
		asm.And.Imm32(asm.R3, 1),
		asm.JEq.Imm(asm.R3, 0, "out"),
		asm.LoadMem(asm.R2, asm.R8, port, asm.Half),
		asm.JEq.Imm(asm.R2, 0, "out"),
		asm.Mov.Imm(asm.R2, 0),
	}
	for at := int16(0); at < recordLen; at += 8 {
		program = append(program, asm.StoreMem(asm.RFP, at-recordLen, asm.R2, asm.DWord))
	}
	field := func(from, to int16, size asm.Size) {
		program = append(program, asm.LoadMem(asm.R2, asm.R8, from, size), asm.StoreMem(asm.RFP, to-recordLen, asm.R2, size))
	}
	for half := int16(0); half < 16 && v6.local != 0; half += 8 {
		field(v6.local+half, recordLocal6+half, asm.DWord)
		field(v6.peer+half, recordPeer6+half, asm.DWord)
	}
	field(addresses, recordPeer4, asm.Word)
	field(addresses+4, recordPeer4+4, asm.Word)
	field(ports, recordPort, asm.Half)
	field(port, recordPort+2, asm.Half)
	field(family, recordFamily, asm.Half)
	field(state, recordFamily+2, asm.Byte)
	return append(program,
		asm.Mov.Reg(asm.R1, asm.R8),
		asm.FnGetSocketCookie.Call(),
		asm.StoreMem(asm.RFP, recordCookie-recordLen, asm.R0, asm.DWord),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -recordLen),
		asm.Mov.Imm(asm.R3, recordLen),
		asm.FnSeqWrite.Call(),

		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Reg(asm.R2, asm.R7),
		asm.Mov.Imm(asm.R3, int32(valueSize)),
		asm.FnSeqWrite.Call(),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("out"),
		asm.Return(),
	)
}
