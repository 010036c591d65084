// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/golden"
)

func TestCatalogueAndProbesMatch(t *testing.T) {
	seen := map[Feature]bool{}
	for _, info := range catalogue {
		if seen[info.Feature] {
			t.Errorf("%s is listed twice", info.Feature)
		}
		seen[info.Feature] = true
		if probes[info.Feature] == nil {
			t.Errorf("%s has no probe", info.Feature)
		}
		if info.Description == "" || info.NeededBy == "" || info.Since == "" || info.Without == "" {
			t.Errorf("%s is not fully described: %+v", info.Feature, info)
		}
		for _, mode := range info.RequiredBy {
			for _, optional := range info.OptionalFor {
				if mode == optional {
					t.Errorf("%s is both required and optional for %s", info.Feature, mode)
				}
			}
		}
	}
	for feature := range probes {
		if !seen[feature] {
			t.Errorf("probe %s is not in the catalogue", feature)
		}
	}
}

func TestParseMask(t *testing.T) {
	tests := []struct {
		text    string
		want    map[Feature]State
		wantErr string
	}{
		{text: "", want: map[Feature]State{}},
		{text: "set_retval=no,batch=no", want: map[Feature]State{SetRetval: No, Batch: No}},
		{text: " tcx = yes , ,jit=inconclusive,", want: map[Feature]State{TCX: Yes, JIT: Inconclusive}},
		{text: "xdp_native:eth0=no,xdp_native=yes", want: map[Feature]State{"xdp_native:eth0": No, XDPNative: Yes}},
		{text: "linux=6.6", want: map[Feature]State{FIBSource: No}},
		{text: "linux=6.1,tcx=yes", want: map[Feature]State{FIBSource: No, NetfilterHook: No, TCX: Yes}},
		{text: "linux=new", wantErr: `"new" is no version`},
		{text: "tcx", wantErr: "want feature=yes|no|inconclusive"},
		{text: "tcx=maybe", wantErr: `"maybe" is none of`},
		{text: "txc=no", wantErr: `unknown feature "txc"`},
		{text: "tcx=no,tcx=yes", wantErr: "twice"},
	}
	for _, tt := range tests {
		t.Run(tt.text, func(t *testing.T) {
			got, err := ParseMask(tt.text)
			if tt.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), tt.wantErr) {
					t.Fatalf("error %v does not mention %q", err, tt.wantErr)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("mask (-want +got):\n%s", diff)
			}
		})
	}
}

func FuzzParseMask(f *testing.F) {
	f.Add("set_retval=no,batch=yes")
	f.Add("xdp_native:eth0=inconclusive")
	f.Fuzz(func(t *testing.T, text string) {
		mask, err := ParseMask(text)
		if err != nil {
			return
		}
		for feature := range mask {
			if _, known := Describe(feature); !known {
				t.Errorf("accepted unknown feature %q", feature)
			}
		}
	})
}

func TestMaskCoversDevices(t *testing.T) {
	mask := map[Feature]State{XDPNative: No, XDPNative.ForDevice("eth1"): Yes}
	for device, want := range map[string]State{"eth0": No, "eth1": Yes} {
		got := probeOne(context.Background(), newHost(Options{Mask: mask}), XDPNative.ForDevice(device))
		if got.State != want {
			t.Errorf("%s is %s, want %s", got.Feature, got.State, want)
		}
	}
}

func TestProbeAfterCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for _, result := range Probe(ctx, Options{Devices: []string{"eth0"}}).Results {
		if result.State != Inconclusive || !errors.Is(result.Err, context.Canceled) {
			t.Errorf("%s is %s with %v, want inconclusive with %v", result.Feature, result.State, result.Err, context.Canceled)
		}
	}
}

func TestProbeOutlivesPanic(t *testing.T) {
	original := probes[Batch]
	t.Cleanup(func() { probes[Batch] = original })
	probes[Batch] = func(context.Context, *host, string) outcome { panic("index out of range") }
	got := probeOne(context.Background(), newHost(Options{}), Batch)
	if got.State != Inconclusive || got.Err == nil || !strings.Contains(got.Err.Error(), "probe batch: internal error: index out of range") {
		t.Errorf("got %s with %v", got.State, got.Err)
	}
}

func TestClassify(t *testing.T) {
	tests := []struct {
		err  error
		want State
	}{
		{nil, Yes},
		{unix.EINVAL, No},
		{unix.E2BIG, No},
		{unix.ENOSYS, No},
		{unix.EOPNOTSUPP, No},
		{ciliumebpf.ErrNotSupported, No},
		{unix.EPERM, Inconclusive},
		{errors.Join(ciliumebpf.ErrNotSupported, unix.EPERM), Inconclusive},
		{unix.EACCES, Inconclusive},
		{unix.ENOMEM, Inconclusive},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprint(tt.err), func(t *testing.T) {
			err := tt.err
			if err != nil {
				err = fmt.Errorf("load program: %w", err)
			}
			got := classify(err, "CAP_X")
			if got.state != tt.want {
				t.Errorf("state = %s, want %s", got.state, tt.want)
			}
			if errors.Is(tt.err, unix.EPERM) && !strings.Contains(got.err.Error(), "needs CAP_X") {
				t.Errorf("error does not name the capability: %v", got.err)
			}
		})
	}
}

func TestFeatureDevice(t *testing.T) {
	f := XDPNative.ForDevice("eth0.100")
	if f != "xdp_native:eth0.100" || f.Base() != XDPNative || f.Device() != "eth0.100" || TCX.Device() != "" {
		t.Errorf("%q: base %q, device %q", f, f.Base(), f.Device())
	}
}

func TestReportLookup(t *testing.T) {
	report := Report{Results: []Result{{Feature: TCX, State: Yes}, {Feature: JIT, State: No}}}
	if !report.Has(TCX) || report.Has(JIT) || report.State(JIT) != No || report.State(BTF) != Inconclusive {
		t.Errorf("tcx %s, jit %s, btf %s", report.State(TCX), report.State(JIT), report.State(BTF))
	}
	if _, found := report.Lookup(BTF); found {
		t.Error("found a feature that is not there")
	}
}

func TestTable(t *testing.T) {
	report := maskedReport(t, "set_retval=no,tcx=inconclusive,xdp_native:eth0=no")
	for i := range report.Results {
		if report.Results[i].Feature == TCX {
			report.Results[i].Err = errors.Join(errors.New("first line"), errors.New("second line"))
		}
	}
	var b bytes.Buffer
	if err := report.WriteTable(&b); err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "table.golden", b.String())
}

func TestJSON(t *testing.T) {
	report := Report{Kernel: "6.1.0", Results: []Result{
		{Feature: Connect4, State: Yes},
		{Feature: SetRetval, State: No, Err: unix.EINVAL},
		{Feature: XDPNative.ForDevice("eth0"), Detail: "a detail", Err: errors.New("why")},
	}}
	got, err := json.MarshalIndent(report, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "report.json.golden", string(got)+"\n")

	empty, err := json.Marshal(Report{})
	if err != nil {
		t.Fatal(err)
	}
	if string(empty) != `{"features":[]}` {
		t.Errorf("empty report is %s", empty)
	}
}
