// SPDX-License-Identifier: Apache-2.0

//go:build linux

package sockdiag

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// StorageValues are the values in a socket storage map, by socket cookie.
type StorageValues map[uint64][]byte

// StorageReader reads a whole socket storage map (BPF_MAP_TYPE_SK_STORAGE), for sockets
// of all network namespaces.
//
// inet_diag can report the values too, but for TCP only: for UDP, kernels up to 6.18 at
// least ignore the request. Therefore a BPF iterator writes them, which needs Linux
// 5.12 with BTF.
type StorageReader struct {
	prog      *ciliumebpf.Program
	iter      *link.Iter
	valueSize int
}

// NewStorageReader prepares to read a map. Closing the reader does not close the map.
// It reads bound sockets in one of the states, a set of 1<<state bits; zero means all
// states. The kernel's types are taken from a cache if there is one. It returns
// ErrStorageNotSupported if the kernel has no suitable iterator.
func NewStorageReader(m *ciliumebpf.Map, states uint32, types *btf.Cache) (_ *StorageReader, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("read socket storage: %w", err)
		}
	}()
	if m.Type() != ciliumebpf.SkStorage {
		return nil, fmt.Errorf("map is of type %s, not %s", m.Type(), ciliumebpf.SkStorage)
	}
	r := &StorageReader{valueSize: int(m.ValueSize())}
	const name = "sk_storage_dump"
	collection, err := ciliumebpf.NewCollectionWithOptions(&ciliumebpf.CollectionSpec{Programs: map[string]*ciliumebpf.ProgramSpec{name: {
		Name:         name,
		Type:         ciliumebpf.Tracing,
		AttachType:   ciliumebpf.AttachTraceIter,
		AttachTo:     "bpf_sk_storage_map",
		License:      "GPL", // bpf_seq_write is GPL-only
		Instructions: dumpStorage(r.valueSize, states),
	}}}, ciliumebpf.CollectionOptions{Cache: types})
	if err != nil {
		if errors.Is(err, unix.EPERM) {
			return nil, err
		}
		// The kernel lacks the iterator, the helper or BTF.
		return nil, fmt.Errorf("%w: %w", ErrStorageNotSupported, err)
	}
	defer collection.Close()
	r.prog = collection.DetachProgram(name)
	if r.iter, err = link.AttachIter(link.IterOptions{Program: r.prog, Map: m}); err != nil {
		return nil, errors.Join(err, r.prog.Close())
	}
	return r, nil
}

// Close frees the reader.
func (r *StorageReader) Close() error { return errors.Join(r.iter.Close(), r.prog.Close()) }

// Read returns the values of all sockets that have one. Call it after the datapath
// stopped selecting the removed backends: a value that is written while Read runs may be
// missing.
func (r *StorageReader) Read(ctx context.Context) (StorageValues, error) {
	f, err := r.iter.Open()
	if err != nil {
		return nil, fmt.Errorf("read socket storage: %w", err)
	}
	defer f.Close()
	values := StorageValues{}
	in := bufio.NewReaderSize(f, 64<<10)
	record := make([]byte, 8+r.valueSize)
	for ctx.Err() == nil {
		_, err := io.ReadFull(in, record)
		if errors.Is(err, io.EOF) {
			return values, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read socket storage: %w", err)
		}
		values[binary.NativeEndian.Uint64(record)] = append([]byte{}, record[8:]...)
	}
	return nil, ctx.Err()
}

// dumpStorage is a program that runs for every socket with a value in the map, and writes
// the cookie of the socket and the value if the socket is in one of the states. A closed
// socket keeps its value for an RCU grace period, but has no port. If the output buffer
// is full, the kernel discards the output of this run, passes the rest to the reader, and
// runs the program again.
func dumpStorage(valueSize int, states uint32) asm.Instructions {
	if states == 0 {
		states = math.MaxUint32
	}
	// struct bpf_iter__bpf_sk_storage_map { meta, map, sk, value }, struct
	// bpf_iter_meta { seq, … }: pointers, 8 bytes each.
	const meta, sk, value, seq = 0, 16, 24, 0
	// struct sock_common { addresses 8, hash 4, peer's port 2, own port 2, family
	// 2, state 1, … }: the same since long before BPF.
	const port, state = 14, 18
	return asm.Instructions{
		asm.LoadMem(asm.R6, asm.R1, meta, asm.DWord),
		asm.LoadMem(asm.R6, asm.R6, seq, asm.DWord),
		asm.LoadMem(asm.R7, asm.R1, value, asm.DWord),
		asm.LoadMem(asm.R1, asm.R1, sk, asm.DWord),
		// Both are NULL in the last call, which marks the end.
		asm.JEq.Imm(asm.R1, 0, "out"),
		asm.JEq.Imm(asm.R7, 0, "out"),

		asm.LoadMem(asm.R2, asm.R1, state, asm.Byte),
		asm.Mov.Imm32(asm.R3, int32(states)),
		asm.RSh.Reg32(asm.R3, asm.R2),
		asm.And.Imm32(asm.R3, 1),
		asm.JEq.Imm(asm.R3, 0, "out"),
		asm.LoadMem(asm.R2, asm.R1, port, asm.Half),
		asm.JEq.Imm(asm.R2, 0, "out"),

		asm.FnGetSocketCookie.Call(),
		asm.StoreMem(asm.RFP, -8, asm.R0, asm.DWord),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -8),
		asm.Mov.Imm(asm.R3, 8),
		asm.FnSeqWrite.Call(),

		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Reg(asm.R2, asm.R7),
		asm.Mov.Imm(asm.R3, int32(valueSize)),
		asm.FnSeqWrite.Call(),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("out"),
		asm.Return(),
	}
}
