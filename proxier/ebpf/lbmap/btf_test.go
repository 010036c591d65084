// SPDX-License-Identifier: Apache-2.0

package lbmap

import (
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

// TestForwardDeclarations: an object declares at most one structure without describing it. Clang writes such declarations in
// the order of addresses in its memory, so that with two of them the object depends on where its sources are
// (BTF_EMIT_STRUCT of bpf/btf_emit.h).
func TestForwardDeclarations(t *testing.T) {
	for name, load := range map[string]func() (*ciliumebpf.CollectionSpec, error){
		"sock": loadSock, "tc": loadTc, "xdp": loadXdp, "arrival": loadArrival, "hold": loadHold, "monitor": loadMonitor,
	} {
		spec, err := load()
		if err != nil {
			t.Fatal(err)
		}
		var declared []string
		for typ, err := range spec.Types.All() {
			if err != nil {
				t.Fatal(err)
			}
			if f, ok := typ.(*btf.Fwd); ok {
				declared = append(declared, f.Name)
			}
		}
		if len(declared) > 1 {
			t.Errorf("%s: only the names of %q are in BTF, in no fixed order: describe them with BTF_EMIT_STRUCT", name, declared)
		}
	}
}
