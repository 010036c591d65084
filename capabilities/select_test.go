// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/golden"
)

// maskedReport is a report in which every feature is there, but for mask. With
// everything masked, nothing is asked of the machine.
func maskedReport(t *testing.T, mask string) Report {
	t.Helper()
	parsed, err := ParseMask(mask)
	if err != nil {
		t.Fatal(err)
	}
	for _, info := range catalogue {
		if _, given := parsed[info.Feature]; !given {
			parsed[info.Feature] = Yes
		}
	}
	return Probe(context.Background(), Options{Devices: []string{"eth0"}, Mask: parsed})
}

// failing is a report in which one feature's probe ended in err.
func failing(t *testing.T, feature Feature, err error) Report {
	t.Helper()
	report := maskedReport(t, "")
	for i := range report.Results {
		if report.Results[i].Feature == feature {
			report.Results[i] = Result{Feature: feature, Err: err}
		}
	}
	return report
}

// dump shows a decision as text.
func dump(d Decision) string {
	var b strings.Builder
	fmt.Fprintf(&b, "mode: %s\n", d.Mode)
	for _, r := range d.Reasons {
		fmt.Fprintf(&b, "reason: [%s] %s\n", r.Feature, r)
	}
	for _, r := range d.Degraded {
		fmt.Fprintf(&b, "degraded: [%s] %s\n", r.Feature, r)
	}
	if d.Err != nil {
		fmt.Fprintf(&b, "error: %v\n", d.Err)
	}
	return b.String()
}

func TestSelectGolden(t *testing.T) {
	tests := []struct {
		name string
		mask string
		req  Request
	}{
		{"everything is there", "", Request{Mode: ModeEBPF}},
		{"required feature missing, no fallback", "netns_cookie=no", Request{Mode: ModeEBPF}},
		{"cgroup root missing, fallback", "cgroup2_root=no", Request{Mode: ModeEBPF, Fallback: []Mode{ModeIPVS, ModeIPTables}}},
		{"first fallback missing too", "mmap_array=no,ipvs=no", Request{Mode: ModeEBPF, Fallback: []Mode{ModeIPVS, ModeIPTables}}},
		{"first fallback tried", "mmap_array=no", Request{
			Mode: ModeEBPF, Fallback: []Mode{ModeIPVS, ModeIPTables}, Failed: map[Mode]error{ModeIPVS: errors.New("no sets")},
		}},
		{"nothing left", "connect6=no,iptables=no", Request{Mode: ModeEBPF, Fallback: []Mode{ModeIPTables}}},
		{"optional features missing", "getpeername4=no,getpeername6=no,set_retval=no,batch=no,tcx=no,inet_diag_destroy=no", Request{Mode: ModeEBPF}},
		{"optional feature inconclusive", "tcx=inconclusive", Request{Mode: ModeEBPF}},
		{"clsact alone missing costs nothing", "clsact=no", Request{Mode: ModeEBPF}},
		{"neither tcx nor clsact", "tcx=no,clsact=no", Request{Mode: ModeEBPF}},
		{"required feature inconclusive", "socket_storage=inconclusive", Request{Mode: ModeEBPF}},
		{"iptables requested", "cgroup2_root=no,ipvs=no", Request{Mode: ModeIPTables}},
	}
	var b strings.Builder
	for _, tt := range tests {
		tt.req.Available = []Mode{ModeEBPF, ModeIPVS, ModeIPTables}
		fmt.Fprintf(&b, "# %s\nmask: %s\nrequest: %s %v\n", tt.name, tt.mask, tt.req.Mode, tt.req.Fallback)
		b.WriteString(dump(Select(maskedReport(t, tt.mask), tt.req)) + "\n")
	}
	golden.Compare(t, "select.golden", b.String())
}

func TestSelect(t *testing.T) {
	all := []Mode{ModeEBPF, ModeIPVS, ModeIPTables}
	tests := []struct {
		name     string
		report   Report
		req      Request
		want     Mode
		degraded []Feature
		errText  []string // every one must be in Err
	}{
		{
			name:   "no mode requested",
			report: maskedReport(t, ""), req: Request{Available: all},
			errText: []string{"no mode was requested"},
		},
		{
			name:   "mode not in the binary",
			report: maskedReport(t, ""), req: Request{Mode: ModeIPVS, Available: []Mode{ModeEBPF}},
			errText: []string{"this binary does not have mode ipvs", "no fallback is configured"},
		},
		{
			name:   "mode not in the binary, fallback is",
			report: maskedReport(t, ""), req: Request{Mode: ModeIPVS, Fallback: []Mode{ModeEBPF}, Available: []Mode{ModeEBPF}},
			want: ModeEBPF,
		},
		{
			name:   "a mode given twice is judged once",
			report: maskedReport(t, "connect4=no"), req: Request{Mode: ModeEBPF, Fallback: []Mode{ModeEBPF}, Available: all},
			errText: []string{"connect4", "4.17", "CONFIG_CGROUP_BPF"},
		},
		{
			name:   "missing feature names kernel and remedy",
			report: maskedReport(t, "cgroup2_root=no"), req: Request{Mode: ModeEBPF, Available: all},
			errText: []string{"cgroup2_root", "since Linux 4.5", "mount -t cgroup2", "--ebpf-cgroup-root"},
		},
		{
			name:   "a probe that failed oddly does not rule out",
			report: failing(t, NetnsCookie, unix.EIO), req: Request{Mode: ModeEBPF, Fallback: []Mode{ModeIPTables}, Available: all},
			want: ModeEBPF, degraded: []Feature{NetnsCookie},
		},
		{
			name:   "a probe that was not permitted does",
			report: failing(t, BPFSyscall, notPermitted(capBPF, unix.EPERM).err), req: Request{Mode: ModeEBPF, Available: all},
			errText: []string{"CAP_BPF", "run privileged"},
		},
		{
			name:   "not permitted, fallback",
			report: failing(t, BPFSyscall, notPermitted(capBPF, unix.EPERM).err),
			req:    Request{Mode: ModeEBPF, Fallback: []Mode{ModeIPTables}, Available: all},
			want:   ModeIPTables,
		},
		{
			name:   "not permitted, optional",
			report: failing(t, TCX, notPermitted(capNet, unix.EPERM).err), req: Request{Mode: ModeEBPF, Available: all},
			want: ModeEBPF, degraded: []Feature{TCX},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := Select(tt.report, tt.req)
			if got.Mode != tt.want {
				t.Errorf("mode = %q, want %q", got.Mode, tt.want)
			}
			if (got.Mode == "") != (got.Err != nil) {
				t.Errorf("mode %q with error %v", got.Mode, got.Err)
			}
			if got.Err != nil && !errors.Is(got.Err, ErrNoMode) {
				t.Errorf("error does not wrap ErrNoMode: %v", got.Err)
			}
			for _, text := range tt.errText {
				if got.Err == nil || !strings.Contains(got.Err.Error(), text) {
					t.Errorf("error %v does not mention %q", got.Err, text)
				}
			}
			var degraded []Feature
			for _, r := range got.Degraded {
				degraded = append(degraded, r.Feature)
			}
			if diff := cmp.Diff(tt.degraded, degraded); diff != "" {
				t.Errorf("degraded (-want +got):\n%s", diff)
			}
		})
	}
}

// An empty report knows nothing; that must not read as "all is well".
func TestSelectEmptyReport(t *testing.T) {
	got := Select(Report{}, Request{Mode: ModeEBPF, Available: []Mode{ModeEBPF}})
	if got.Mode != ModeEBPF {
		t.Fatalf("mode = %q, want %q: %v", got.Mode, ModeEBPF, got.Err)
	}
	reported := map[Feature]bool{}
	for _, r := range got.Degraded {
		reported[r.Feature] = true
	}
	for _, info := range catalogue {
		if len(info.RequiredBy) > 0 && info.RequiredBy[0] == ModeEBPF && !reported[info.Feature] {
			t.Errorf("%s is required, unknown and not reported", info.Feature)
		}
	}
}

// Every required feature on its own rules its mode out, with a remedy.
func TestSelectEachRequirement(t *testing.T) {
	for _, info := range catalogue {
		for _, mode := range info.RequiredBy {
			t.Run(fmt.Sprintf("%s/%s", mode, info.Feature), func(t *testing.T) {
				got := Select(maskedReport(t, string(info.Feature)+"=no"), Request{Mode: mode, Available: []Mode{mode}})
				if got.Err == nil {
					t.Fatalf("selected %s", got.Mode)
				}
				for _, text := range []string{string(info.Feature), info.Description, ErrMasked.Error()} {
					if !strings.Contains(got.Err.Error(), text) {
						t.Errorf("error does not mention %q: %v", text, got.Err)
					}
				}
				if info.Since == "-" && info.Remedy == "" {
					t.Error("nothing tells the operator what to do")
				}
			})
		}
	}
}

func TestNotPermittedIsErrPermission(t *testing.T) {
	if o := classify(fmt.Errorf("load: %w", unix.EPERM), capBPF); !errors.Is(o.err, fs.ErrPermission) {
		t.Errorf("%v is not fs.ErrPermission", o.err)
	}
}
