// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestLoadLogsVerifier: the complete output of the verifier is logged, and is part of the error
// that errors.As finds.
func TestLoadLogsVerifier(t *testing.T) {
	if os.Geteuid() != 0 {
		lab.SkipOrFail(t, errors.New("root"))
	}
	const steps = 40
	instructions := asm.Instructions{asm.Mov.Imm(asm.R0, 0)}
	for i := range steps {
		instructions = append(instructions, asm.Add.Imm(asm.R0, int32(i)))
	}
	// R5 was never written.
	instructions = append(instructions, asm.Mov.Reg(asm.R0, asm.R5), asm.Return())
	spec := &ciliumebpf.CollectionSpec{Programs: map[string]*ciliumebpf.ProgramSpec{
		"bad": {Type: ciliumebpf.SocketFilter, Instructions: instructions, License: "GPL"},
	}}
	var log bytes.Buffer
	config := textlogger.NewConfig(textlogger.Output(&log), textlogger.Verbosity(2))
	ctx := klog.NewContext(context.Background(), textlogger.NewLogger(config))
	_, err := datapath.Load(ctx, "test programs", spec, ciliumebpf.CollectionOptions{})
	var rejected *ciliumebpf.VerifierError
	if !errors.As(err, &rejected) || len(rejected.Log) < steps {
		t.Fatalf("%v: the error has %d lines of the verifier's output", err, len(rejected.Log))
	}
	if strings.Contains(err.Error(), rejected.Log[0]) {
		t.Errorf("the error text has the whole verifier output: %v", err)
	}
	for _, line := range []string{rejected.Log[0], rejected.Log[len(rejected.Log)-1]} {
		if !strings.Contains(log.String(), strings.TrimSpace(line)) {
			t.Errorf("the log lacks %q:\n%s", line, log.String())
		}
	}
}
