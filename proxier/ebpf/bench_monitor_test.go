// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// BenchmarkMonitorOff measures what the monitor costs while it does not run: for a connection that fails, the call of the function
// that it attaches to. TestMonitor checks that nothing else is there. What is served never calls it. Two programs that
// differ by that call take turns.
func BenchmarkMonitorOff(b *testing.B) {
	spec, err := lbmap.SocketSpec()
	if err != nil {
		b.Fatal(err)
	}
	without := asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}
	with := append(asm.Instructions{
		asm.Mov.Reg(asm.R1, asm.RFP), asm.Mov.Imm(asm.R2, 0), asm.Mov.Imm(asm.R3, 0), asm.Call.Label("connection_failed"),
	}, without...)
	function := false
	for _, i := range spec.Programs["tdm_connect4"].Instructions {
		if symbol := i.Symbol(); symbol != "" {
			function = symbol == "connection_failed"
		}
		if function { // without the types of the other program
			with = append(with, asm.Instruction{OpCode: i.OpCode, Dst: i.Dst, Src: i.Src, Offset: i.Offset, Constant: i.Constant}.WithSymbol(i.Symbol()))
		}
	}
	var programs [2]*ciliumebpf.Program
	for i, list := range []asm.Instructions{without, with} {
		if programs[i], err = ciliumebpf.NewProgram(&ciliumebpf.ProgramSpec{Type: ciliumebpf.SchedCLS, License: "MIT", Instructions: list}); err != nil {
			b.Fatalf("%+v", err)
		}
		defer programs[i].Close()
	}
	var times [2][]float64
	for range b.N {
		for i, p := range programs {
			_, took, err := p.Benchmark(make([]byte, 64), 1_000_000, nil)
			if err != nil {
				b.Fatal(err)
			}
			times[i] = append(times[i], float64(took.Nanoseconds()))
		}
	}
	b.ReportMetric(median(times[1])-median(times[0]), "ns-call")
	b.ReportMetric(0, "ns/op")
}
