// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"fmt"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/tandem-proxy/tandem/test/lab"
)

// BenchmarkFrontendKey measures the cost of one key for both families: a lookup of the 20-byte
// key, which has IPv4 mapped into IPv6, compared with the 8-byte key of an IPv4-only map. Keys
// are picked at random. key=0 is the same program without the lookup.
func BenchmarkFrontendKey(b *testing.B) {
	for _, entries := range []int{1000, 50000} {
		for _, size := range []int{0, 8, 20} {
			name := fmt.Sprintf("entries=%d/key=%d", entries, size)
			b.Run(name, func(b *testing.B) { benchmarkKey(b, entries, size) })
		}
	}
}

func benchmarkKey(b *testing.B, entries, size int) {
	keySize := max(size, 8)
	m, err := ciliumebpf.NewMap(&ciliumebpf.MapSpec{Name: "bench_key", Type: ciliumebpf.Hash, KeySize: uint32(keySize), ValueSize: 16, MaxEntries: 1 << 17})
	if err != nil {
		lab.SkipOrFail(b, fmt.Errorf("permission to make maps: %w", err))
	}
	defer m.Close()
	keys, values := make([]byte, entries*keySize), make([]byte, entries*16)
	for i := range entries {
		// Only the last word of the address varies: word 0 of the short key, word 3 of the
		// long one.
		at := i * keySize
		if keySize == 20 {
			at += 12
		}
		binary.NativeEndian.PutUint32(keys[at:], uint32(i))
	}
	for i := range entries {
		if err := m.Put(keys[i*keySize:(i+1)*keySize], values[i*16:(i+1)*16]); err != nil {
			b.Fatal(err)
		}
	}
	at := int16(-24)
	varying := at
	if keySize == 20 {
		varying += 12
	}
	program := asm.Instructions{
		asm.StoreImm(asm.RFP, at, 0, asm.Word),
		asm.StoreImm(asm.RFP, at+4, 0, asm.Word),
		asm.StoreImm(asm.RFP, at+8, 0, asm.Word),
		asm.StoreImm(asm.RFP, at+12, 0, asm.Word),
		asm.StoreImm(asm.RFP, at+16, 0, asm.Word),
		asm.FnGetPrandomU32.Call(),
		asm.Mod.Imm32(asm.R0, int32(entries)),
		asm.StoreMem(asm.RFP, varying, asm.R0, asm.Word),
	}
	if size > 0 {
		program = append(program,
			asm.LoadMapPtr(asm.R1, m.FD()),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, int32(at)),
			asm.FnMapLookupElem.Call(),
		)
	}
	program = append(program, asm.Mov.Imm(asm.R0, 0), asm.Return())
	p, err := ciliumebpf.NewProgram(&ciliumebpf.ProgramSpec{Name: "bench_key", Type: ciliumebpf.SocketFilter, Instructions: program, License: "GPL"})
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	const repeat = 1 << 20
	total := 0.0
	for range b.N {
		_, took, err := p.Benchmark(make([]byte, 64), repeat, nil)
		if err != nil {
			b.Fatal(err)
		}
		total += float64(took.Nanoseconds())
	}
	b.ReportMetric(total/float64(b.N), "ns/lookup")
	b.ReportMetric(0, "ns/op")
}
