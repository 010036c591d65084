// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// Options says where to look. The zero value probes the machine as it is.
type Options struct {
	// CgroupRoot is the cgroup v2 directory to use; found by FindCgroup2Root
	// when empty.
	CgroupRoot string
	// ProcRoot is the proc filesystem, /proc when empty.
	ProcRoot string
	// SysRoot is the sysfs, /sys when empty.
	SysRoot string
	// ModulesRoot holds one directory per kernel release, /lib/modules when
	// empty. It tells an absent module from one that is merely not loaded.
	ModulesRoot string
	// Devices are probed for native XDP, each on its own.
	Devices []string
	// LoadModules allows questions that make the kernel load a module on
	// demand, as using the feature would. Without it, a feature whose module
	// is not loaded yet is Inconclusive. It matters for ipset, nf_tables and
	// udp_diag; ip_vs needs a modprobe in any case.
	LoadModules bool
	// Mask replaces the answer for a feature (or, for per-device features, for
	// one device or all of them); a masked feature is not probed at all.
	Mask map[Feature]State
}

// ownSys is the sysfs of the kernel that this process runs on.
const ownSys = "/sys"

// withDefaults fills in the usual places.
func (o Options) withDefaults() Options {
	setDefault := func(field *string, value string) {
		if *field == "" {
			*field = value
		}
	}
	setDefault(&o.ProcRoot, "/proc")
	setDefault(&o.SysRoot, ownSys)
	setDefault(&o.ModulesRoot, "/lib/modules")
	return o
}

// ErrMasked is the Err of a masked feature that is not Yes.
var ErrMasked = errors.New("masked by option")

// outcome is a Result before it knows its feature.
type outcome struct {
	state  State
	err    error
	detail string
}

func yes(detail string) outcome              { return outcome{state: Yes, detail: detail} }
func no(err error) outcome                   { return outcome{state: No, err: err} }
func inconclusive(err error) outcome         { return outcome{state: Inconclusive, err: err} }
func notPermitted(c string, e error) outcome { return inconclusive(fmt.Errorf("needs %s: %w", c, e)) }

// probeFunc answers for one feature. Per-device features get their device.
type probeFunc func(ctx context.Context, host *host, device string) outcome

// probes has one entry per catalogue entry; a test holds the two together.
var probes = map[Feature]probeFunc{
	BPFSyscall: probeBPFSyscall,
	OpenByID:   probeOpenByID,
	BTF:        probeBTF,
	JIT:        probeJIT,

	Cgroup2Root:    probeCgroup2Root,
	CgroupReplace:  probeCgroupReplace,
	Connect4:       probeSockAddr(ciliumebpf.AttachCGroupInet4Connect),
	Connect6:       probeSockAddr(ciliumebpf.AttachCGroupInet6Connect),
	Sendmsg4:       probeSockAddr(ciliumebpf.AttachCGroupUDP4Sendmsg),
	Sendmsg6:       probeSockAddr(ciliumebpf.AttachCGroupUDP6Sendmsg),
	Recvmsg4:       probeSockAddr(ciliumebpf.AttachCGroupUDP4Recvmsg),
	Recvmsg6:       probeSockAddr(ciliumebpf.AttachCGroupUDP6Recvmsg),
	Getpeername4:   probeSockAddr(ciliumebpf.AttachCgroupInet4GetPeername),
	Getpeername6:   probeSockAddr(ciliumebpf.AttachCgroupInet6GetPeername),
	PostBind4:      probePostBind(ciliumebpf.AttachCGroupInet4PostBind),
	PostBind6:      probePostBind(ciliumebpf.AttachCGroupInet6PostBind),
	NetnsCookie:    probeNetnsCookie,
	SocketStorage:  probeSocketStorage,
	GlobalPointers: probeGlobalPointers,
	SetRetval:      probeSetRetval,
	KtimeCoarse:    probeKtimeCoarse,

	MmapArray: probeMmapArray,
	Batch:     probeBatch,

	TCX:             probeTCX,
	Clsact:          probeClsact,
	Atomics:         probeAtomics,
	RedirectNeigh:   probeRedirectNeigh,
	FIBLookup:       probeFIB(0),
	FIBSource:       probeFIB(fibLookupSrc),
	Loop:            probeLoop,
	ConntrackLookup: probeKfunc("bpf_skb_ct_lookup", "nf_conntrack"),
	NetfilterHook:   probeNetfilterHook,
	XDPGeneric:      probeXDPGeneric,
	XDPNative:       probeXDPNative,

	IPVS:            probeIPVS,
	IPVSSchedulers:  probeIPVSSchedulers,
	IPSet:           probeIPSet,
	IPTables:        probeIPTables,
	IPTablesNFT:     probeIPTablesNFT,
	IPTablesLegacy:  probeIPTablesLegacy,
	Conntrack:       probeConntrack,
	InetDiagDestroy: probeInetDiagDestroy,
}

// Probe asks for every feature in turn, on the calling goroutine: a caller
// locked to a thread in another network namespace gets that namespace's
// answers. Once ctx is done the remaining features are Inconclusive.
//
// On kernels before 5.11 it raises this process's locked-memory limit, without
// which no map could be created and every answer would be "not permitted".
func Probe(ctx context.Context, opts Options) Report {
	h := newHost(opts)
	report := Report{Kernel: h.release()}
	// Most of the time goes into these two.
	go h.symbols()
	go h.types()
	// A failure shows up as EPERM of the probes that needed the limit.
	_ = rlimit.RemoveMemlock()
	for _, info := range catalogue {
		for _, feature := range instances(info.Feature, opts.Devices) {
			report.Results = append(report.Results, probeOne(ctx, h, feature))
		}
	}
	return report
}

// instances expands a per-device feature into one feature per device.
func instances(f Feature, devices []string) []Feature {
	if f != XDPNative {
		return []Feature{f}
	}
	var out []Feature
	for _, device := range devices {
		out = append(out, f.ForDevice(device))
	}
	return out
}

func probeOne(ctx context.Context, h *host, feature Feature) (result Result) {
	result.Feature = feature
	if state, masked := maskedState(h.opts.Mask, feature); masked {
		result.State = state
		result.Detail = "masked"
		if state != Yes {
			result.Detail, result.Err = "", ErrMasked
		}
		return result
	}
	if err := ctx.Err(); err != nil {
		result.Err = fmt.Errorf("not probed: %w", err)
		return result
	}
	// A probe parses what kernels and tools of any age print. A mistake in that
	// must cost one answer, not the node's network.
	defer func() {
		if p := recover(); p != nil {
			result.State, result.Detail = Inconclusive, ""
			result.Err = fmt.Errorf("probe %s: internal error: %v", feature, p)
		}
	}()
	o := probes[feature.Base()](ctx, h, feature.Device())
	result.State, result.Err, result.Detail = o.state, o.err, o.detail
	return result
}

func maskedState(mask map[Feature]State, f Feature) (State, bool) {
	if state, ok := mask[f]; ok {
		return state, true
	}
	state, ok := mask[f.Base()]
	return state, ok
}

// ParseMask reads "set_retval=no,batch=no,xdp_native:eth0=inconclusive". Empty
// text is an empty mask. An unknown feature is an error: a typing mistake
// would otherwise leave a test testing nothing. "linux=5.15" masks every feature
// that Linux 5.15 does not have and that is not named besides.
func ParseMask(text string) (map[Feature]State, error) {
	mask := map[Feature]State{}
	var missing []Feature
	for item := range strings.SplitSeq(text, ",") {
		item = strings.TrimSpace(item)
		if item == "" {
			continue
		}
		name, value, found := strings.Cut(item, "=")
		if !found {
			return nil, fmt.Errorf("mask %q: want feature=yes|no|inconclusive", item)
		}
		feature := Feature(strings.TrimSpace(name))
		if feature == "linux" {
			newer, err := since(strings.TrimSpace(value))
			if err != nil {
				return nil, fmt.Errorf("mask %q: %w", item, err)
			}
			missing = append(missing, newer...)
			continue
		}
		if _, known := Describe(feature); !known {
			return nil, fmt.Errorf("mask %q: unknown feature %q (known: %s)", item, feature, knownFeatures())
		}
		if _, twice := mask[feature]; twice {
			return nil, fmt.Errorf("mask %q: feature %q is given twice", item, feature)
		}
		var state State
		if err := state.UnmarshalText([]byte(strings.TrimSpace(value))); err != nil {
			return nil, fmt.Errorf("mask %q: %w", item, err)
		}
		mask[feature] = state
	}
	for _, feature := range missing {
		if _, named := mask[feature]; !named {
			mask[feature] = No
		}
	}
	return mask, nil
}

// since returns the features that are newer than a version of Linux, as "5.15".
func since(version string) (newer []Feature, err error) {
	number := func(version string) (major, minor int, err error) {
		if _, err := fmt.Sscanf(version, "%d.%d", &major, &minor); err != nil {
			return 0, 0, fmt.Errorf("%q is no version of Linux, as 5.15", version)
		}
		return major, minor, nil
	}
	major, minor, err := number(version)
	if err != nil {
		return nil, err
	}
	for _, info := range catalogue {
		if info.Since == "-" {
			continue
		}
		a, b, err := number(info.Since)
		if err != nil {
			return nil, err
		}
		if a > major || a == major && b > minor {
			newer = append(newer, info.Feature)
		}
	}
	return newer, nil
}

func knownFeatures() string {
	names := make([]string, 0, len(catalogue))
	for _, info := range catalogue {
		names = append(names, string(info.Feature))
	}
	return strings.Join(names, ", ")
}

// fromKernel turns the error of a harmless, well-formed request into an answer.
// capability names what the process needs to be allowed to ask.
//
// When a request fails, the BPF library runs feature tests of its own to explain
// why. Those take any failure for a missing feature, a lack of privilege too, and
// their verdict replaces the true error. So "not supported" counts only if the
// most ordinary program can be loaded.
func fromKernel(err error, capability string) outcome {
	o := classify(err, capability)
	if o.state == No && errors.Is(err, ciliumebpf.ErrNotSupported) {
		prog, loadErr := loadProgram(&ciliumebpf.ProgramSpec{Type: ciliumebpf.SchedCLS, Instructions: returning(0)})
		if loadErr == nil {
			loadErr = prog.Close()
		}
		if errors.Is(loadErr, unix.EPERM) {
			return notPermitted(capability, loadErr)
		}
	}
	return o
}

// classify is fromKernel for an error that is known to be the kernel's.
func classify(err error, capability string) outcome {
	switch {
	case err == nil:
		return yes("")
	case errors.Is(err, unix.EPERM):
		return notPermitted(capability, err)
	case errors.Is(err, ciliumebpf.ErrNotSupported), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EOPNOTSUPP):
		return no(err)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.E2BIG):
		// The request is valid on kernels that know the feature; E2BIG is how
		// older ones reject attributes beyond the end of their structs.
		return no(err)
	}
	return inconclusive(err)
}

// host gives probes the machine's files, and keeps what is costly to read.
type host struct {
	opts    Options
	symbols func() kernelSymbols
	types   func() kernelTypes
}

func newHost(opts Options) *host {
	h := &host{opts: opts.withDefaults()}
	h.symbols, h.types = sync.OnceValue(h.readSymbols), sync.OnceValue(h.readTypes)
	return h
}

func (h *host) proc(elem ...string) string {
	return filepath.Join(append([]string{h.opts.ProcRoot}, elem...)...)
}

func (h *host) sys(elem ...string) string {
	return filepath.Join(append([]string{h.opts.SysRoot}, elem...)...)
}

func (h *host) release() string {
	text, err := os.ReadFile(h.proc("sys/kernel/osrelease"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}
