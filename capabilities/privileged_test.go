// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// needRoot skips a test that asks the kernel things only root may ask.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 || os.Getenv("TANDEM_WITHOUT_ROOT") == "1" {
		skipOrFail(t, "not root: CAP_BPF and CAP_NET_ADMIN are missing")
	}
	if err := tryMap(&ciliumebpf.MapSpec{Type: ciliumebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}); errors.Is(err, unix.EPERM) {
		skipOrFail(t, "root without CAP_BPF: "+err.Error())
	}
}

// skipOrFail skips a test, or fails it on a machine that should have what is
// missing, as test/lab does for the rest of the project.
func skipOrFail(t *testing.T, missing string) {
	t.Helper()
	if os.Getenv("TANDEM_REQUIRE_PRIVILEGED") == "1" {
		t.Fatal("missing: " + missing)
	}
	t.Skip("missing: " + missing)
}

// kernelAtLeast compares the running kernel's release.
func kernelAtLeast(t *testing.T, major, minor int) bool {
	t.Helper()
	release := newHost(Options{}).release()
	var haveMajor, haveMinor int
	if _, err := fmt.Sscanf(release, "%d.%d", &haveMajor, &haveMinor); err != nil {
		t.Fatalf("release %q: %v", release, err)
	}
	return haveMajor > major || haveMajor == major && haveMinor >= minor
}

func TestProbeThisMachine(t *testing.T) {
	needRoot(t)
	before := ownObjects(t)
	devices := interfaceNames(t)

	report := Probe(context.Background(), Options{Devices: []string{"lo"}})

	var table strings.Builder
	if err := report.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	t.Logf("kernel %s\n%s", report.Kernel, &table)

	for _, result := range report.Results {
		if result.State == Inconclusive && result.Err == nil {
			t.Errorf("%s is inconclusive without a reason", result.Feature)
		}
		// What this process may not ask is a matter of privilege, and this
		// process has all of it.
		if errors.Is(result.Err, unix.EPERM) {
			t.Errorf("%s: %v", result.Feature, result.Err)
		}
	}
	// Features by the kernel that brought them. A kernel this new that lacks one
	// is configured without it, which no distribution's kernel for nodes is.
	for _, want := range []struct {
		major, minor int
		features     []Feature
	}{
		{5, 8, []Feature{BPFSyscall, OpenByID, CgroupReplace, Connect4, Connect6, Sendmsg4, Sendmsg6, Recvmsg4, Recvmsg6, Getpeername4, Getpeername6,
			PostBind4, PostBind6, NetnsCookie, SocketStorage, MmapArray, Batch, FIBLookup, XDPGeneric}},
		{5, 11, []Feature{KtimeCoarse, RedirectNeigh}},
		{5, 12, []Feature{GlobalPointers}},
		// Linux 5.12, on arm64 5.18.
		{5, 18, []Feature{Atomics}},
		{6, 1, []Feature{SetRetval}},
		{6, 6, []Feature{TCX}},
		{6, 7, []Feature{FIBSource}},
	} {
		if !kernelAtLeast(t, want.major, want.minor) {
			continue
		}
		for _, feature := range want.features {
			if result, _ := report.Lookup(feature); result.State != Yes {
				t.Errorf("%s is %s on %s: %v", feature, result.State, report.Kernel, result.Err)
			}
		}
	}
	// Loopback has no driver, whose XDP could be native.
	if kernelAtLeast(t, 6, 3) && report.State(XDPNative.ForDevice("lo")) != No {
		t.Errorf("xdp_native:lo is %s", report.State(XDPNative.ForDevice("lo")))
	}
	// Where a file shows the answer, the probe must agree with it.
	agreesWithFile(t, report, BTF, "/sys/kernel/btf/vmlinux")
	agreesWithFile(t, report, IPVS, "/proc/net/ip_vs")
	agreesWithFile(t, report, Conntrack, "/proc/sys/net/netfilter/nf_conntrack_max")

	nothingNew(t, before)
	for _, name := range devices {
		if !slices.Contains(interfaceNames(t), name) {
			t.Errorf("device %s is gone", name)
		}
	}
}

// The check for leftovers must see an object that is left over.
func TestOwnObjectsSeesAMap(t *testing.T) {
	needRoot(t)
	before := ownObjects(t)
	m, err := newMap(&ciliumebpf.MapSpec{Type: ciliumebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	info, err := m.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()
	if object := fmt.Sprintf("map %d", id); !ownObjects(t)[object] || before[object] {
		t.Errorf("%s was not seen", object)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	nothingNew(t, before)
}

// agreesWithFile compares a conclusive answer with the existence of a file.
func agreesWithFile(t *testing.T, report Report, feature Feature, path string) {
	t.Helper()
	want := No
	if _, err := os.Stat(path); err == nil {
		want = Yes
	}
	got := report.State(feature)
	if got == want || want == No && got == Inconclusive {
		return
	}
	t.Errorf("%s is %s, but %s says %s", feature, got, path, want)
}

// The eBPF tier must be selected on a kernel that can load its programs, and on no
// other: that has to say why.
func TestSelectOnThisMachine(t *testing.T) {
	needRoot(t)
	report := Probe(context.Background(), Options{})
	if !report.Has(Cgroup2Root) {
		skipOrFail(t, "no cgroup2 is mounted")
	}
	decision := Select(report, Request{Mode: ModeEBPF, Available: []Mode{ModeEBPF}})
	t.Log(dump(decision))
	if able := kernelAtLeast(t, 5, 12); able != (decision.Mode == ModeEBPF) || able != (decision.Err == nil) {
		t.Errorf("mode = %q: %v", decision.Mode, decision.Err)
	}
	if decision.Mode != ModeEBPF {
		return
	}
	more := 0
	if report.Has(SetRetval) {
		more = 1
	}
	without := map[Feature]State{SetRetval: No}
	masked := Select(Probe(context.Background(), Options{Mask: without}), Request{Mode: ModeEBPF, Available: []Mode{ModeEBPF}})
	if len(masked.Degraded) != len(decision.Degraded)+more {
		t.Errorf("masking set_retval did not degrade:\n%s", dump(masked))
	}
}

// What no kernel has must be No: a probe that says yes to anything is worthless.
func TestNonsenseIsNo(t *testing.T) {
	needRoot(t)
	ctx, h := context.Background(), newHost(Options{})
	const noHelper = asm.BuiltinFunc(5000)
	tests := []struct {
		name string
		got  outcome
	}{
		{"attach type", probeSockAddr(ciliumebpf.AttachSkMsgVerdict)(ctx, h, "")},
		{"helper", probeHelper(noHelper.Call())},
		{"field of the context", probeHelper(asm.LoadMem(asm.R2, asm.R1, 4000, asm.DWord))},
		{"fib flag", probeFIB(1<<30)(ctx, h, "")},
		{"kfunc", probeKfunc("bpf_no_such_function", "vmlinux")(ctx, h, "")},
	}
	for _, tt := range tests {
		if tt.got.state != No {
			t.Errorf("%s: %s (%v), want no", tt.name, tt.got.state, tt.got.err)
		}
	}
	if _, found, err := findGenlFamily("tandem-none"); found || err != nil {
		t.Errorf("generic netlink family: found %v, %v", found, err)
	}
}

// probeWith probes on a thread that has these capabilities alone.
func probeWith(t *testing.T, capabilities ...int) (report Report) {
	t.Helper()
	var data [2]unix.CapUserData
	for _, c := range capabilities {
		data[c/32].Effective |= 1 << (c % 32)
		data[c/32].Permitted |= 1 << (c % 32)
	}
	var err error
	onDoomedThread(func() {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		if err = unix.Capset(&header, &data[0]); err == nil {
			// Without its module, a feature is not probed, so that nothing could refuse.
			report = Probe(context.Background(), Options{LoadModules: true})
		}
	})
	if err != nil {
		t.Fatalf("drop capabilities: %v", err)
	}
	return report
}

// Without privilege the answer is "was not allowed to ask", never "no".
func TestProbeWithoutCapabilities(t *testing.T) {
	needRoot(t)
	report := probeWith(t)
	for _, feature := range []Feature{
		OpenByID, CgroupReplace, Connect4, Sendmsg6, Recvmsg4, Getpeername6, PostBind4, NetnsCookie, SocketStorage, GlobalPointers, SetRetval, KtimeCoarse,
		TCX, Atomics, RedirectNeigh, FIBLookup, FIBSource, XDPGeneric, InetDiagDestroy,
	} {
		result, _ := report.Lookup(feature)
		if result.State != Inconclusive || !errors.Is(result.Err, unix.EPERM) || !strings.Contains(result.Err.Error(), "needs CAP_") {
			t.Errorf("%s is %s with %v, want inconclusive with the capability that is missing", feature, result.State, result.Err)
		}
	}
	decision := Select(report, Request{Mode: ModeEBPF, Available: []Mode{ModeEBPF}})
	if decision.Err == nil || !strings.Contains(decision.Err.Error(), "run privileged") {
		t.Errorf("selected %q with error %v", decision.Mode, decision.Err)
	}
}

// CAP_BPF lets a process load programs, and not find what the one before it left: mode ebpf is
// ruled out before anything is loaded, by what names the capability.
func TestProbeWithoutSysAdmin(t *testing.T) {
	needRoot(t)
	report := probeWith(t, unix.CAP_NET_ADMIN, unix.CAP_NET_RAW, unix.CAP_BPF, unix.CAP_PERFMON)
	for _, feature := range []Feature{BPFSyscall, MmapArray, Connect4, SocketStorage} {
		if result, _ := report.Lookup(feature); result.State != Yes {
			t.Errorf("%s is %s: %v", feature, result.State, result.Err)
		}
	}
	modes := []Mode{ModeEBPF, ModeIPTables}
	decision := Select(report, Request{Mode: ModeEBPF, Fallback: modes[1:], Available: modes})
	if decision.Mode != ModeIPTables || decision.Reasons[0].Feature != OpenByID || !strings.Contains(decision.Reasons[0].Text, "needs CAP_SYS_ADMIN") {
		t.Errorf("selected %q because of %q, error %v", decision.Mode, decision.Reasons, decision.Err)
	}
}

// In a network namespace of its own, net.core.bpf_jit_enable does not exist, and
// loopback is down.
func TestProbeInNetworkNamespace(t *testing.T) {
	needRoot(t)
	compiled := Yes
	if text, err := os.ReadFile("/proc/sys/net/core/bpf_jit_enable"); err == nil && strings.TrimSpace(string(text)) == "0" {
		compiled = No
	}
	var jit, tcx, destroy outcome
	var setupErr error
	onDoomedThread(func() {
		if setupErr = unix.Unshare(unix.CLONE_NEWNET); setupErr != nil {
			return
		}
		ctx, h := context.Background(), newHost(Options{})
		jit, tcx, destroy = probeJIT(ctx, h, ""), probeTCX(ctx, h, ""), probeInetDiagDestroy(ctx, h, "")
	})
	if setupErr != nil {
		t.Fatalf("make a network namespace: %v", setupErr)
	}
	if jit.state != compiled {
		t.Errorf("jit is %s, want %s: %v", jit.state, compiled, jit.err)
	}
	if kernelAtLeast(t, 6, 6) && tcx.state != Yes {
		t.Errorf("tcx is %s: %v", tcx.state, tcx.err)
	}
	if destroy.state == Yes || destroy.err == nil {
		t.Errorf("inet_diag_destroy is %s with %v, where no socket could be connected", destroy.state, destroy.err)
	}
}

// onDoomedThread runs fn on a thread that ends with it, so that what fn changes
// about the thread affects no other code.
func onDoomedThread(fn func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		fn()
	}()
	<-done
}

// nothingNew waits until no program or map of these tests is left that was not there
// before: the kernel frees what a program refers to only after a grace period.
// Tests of other packages may be probing at the same time, so that objects come
// and go; what a probe leaves behind stays.
func nothingNew(t *testing.T, before map[string]bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	suspects := ownObjects(t)
	for {
		for object := range suspects {
			if before[object] {
				delete(suspects, object)
			}
		}
		if len(suspects) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("left behind: %v", slices.Sorted(maps.Keys(suspects)))
			return
		}
		time.Sleep(20 * time.Millisecond)
		now := ownObjects(t)
		maps.DeleteFunc(suspects, func(object string, _ bool) bool { return !now[object] })
	}
}

// ownObjects lists loaded programs and maps that carry probeName, by kind and
// id. Others come and go with whatever else runs on the machine.
func ownObjects(t *testing.T) map[string]bool {
	t.Helper()
	own := map[string]bool{}
	for id, err := ciliumebpf.ProgramGetNextID(0); err == nil; id, err = ciliumebpf.ProgramGetNextID(id) {
		prog, err := ciliumebpf.NewProgramFromID(id)
		if err != nil {
			continue
		}
		if info, err := prog.Info(); err == nil && info.Name == probeName {
			own[fmt.Sprintf("program %d", id)] = true
		}
		prog.Close()
	}
	for id, err := ciliumebpf.MapGetNextID(0); err == nil; id, err = ciliumebpf.MapGetNextID(id) {
		m, err := ciliumebpf.NewMapFromID(id)
		if err != nil {
			continue
		}
		if info, err := m.Info(); err == nil && info.Name == probeName {
			own[fmt.Sprintf("map %d", id)] = true
		}
		m.Close()
	}
	return own
}

func interfaceNames(t *testing.T) []string {
	t.Helper()
	interfaces, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, i := range interfaces {
		names = append(names, i.Name)
	}
	return names
}
