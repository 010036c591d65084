// SPDX-License-Identifier: Apache-2.0

package writer

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/synthetic"
)

var updateSpeed = flag.Bool("update-speed", false, "rewrite what testdata knows of the control plane's speed on this processor")

// slip is how much slower the control plane may be than was recorded, and how much more it may allocate.
const slip = 1.1

// speed is what the control plane costs: time as a multiple of a fixed piece of work, and what it allocates for a Service.
type speed struct {
	insert, remove, objects, bytes float64
}

const speedFormat = "insert %.3f remove %.3f objects %.2f bytes %.0f"

func (s speed) String() string {
	return fmt.Sprintf(speedFormat, s.insert, s.remove, s.objects, s.bytes)
}

// slipped says what is more than it may be; nothing if all is well.
func (s speed) slipped(recorded speed) (what []string) {
	for _, v := range []struct {
		name    string
		is, was float64
	}{
		{"time to insert", s.insert, recorded.insert}, {"time to remove", s.remove, recorded.remove},
		{"objects", s.objects, recorded.objects}, {"bytes", s.bytes, recorded.bytes},
	} {
		if v.is > v.was*slip {
			what = append(what, fmt.Sprintf("%s: %.3f, was %.3f", v.name, v.is, v.was))
		}
	}
	return what
}

// TestControlPlaneSpeed: to insert and remove Services takes no longer than it did, and no more memory. Times are ratios to a fixed piece
// of work in the same rounds, of which the fastest count: others are disturbed. Where it seems slower, more rounds follow. After an
// intended change, or on another processor, -update-speed records the values.
func TestControlPlaneSpeed(t *testing.T) {
	if testing.Short() {
		t.Skip("missing: the time for many rounds in short mode, which make test-all has")
	}
	const services, rounds, most = 20000, 8, 60
	file := filepath.Join("testdata", "speed-"+processor(t)+".txt")
	var recorded speed
	text, err := os.ReadFile(file)
	switch {
	case *updateSpeed:
		recorded = speed{math.Inf(1), math.Inf(1), math.Inf(1), math.Inf(1)}
	case errors.Is(err, fs.ErrNotExist):
		t.Skipf("missing: %s, the speed on this processor; -update-speed records it", file)
	case err != nil:
		t.Fatal(err)
	default:
		if _, err := fmt.Sscanf(strings.TrimSpace(string(text)), strings.NewReplacer(".3", "", ".2", "", ".0", "").Replace(speedFormat), &recorded.insert, &recorded.remove, &recorded.objects, &recorded.bytes); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
	}
	var ss []*v1.Service
	var es []*discoveryv1.EndpointSlice
	for i := range services {
		ss, es = append(ss, synthetic.Service(i)), append(es, synthetic.Slice(i, 0, i*8, 1))
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // what the collector costs follows from what is allocated
	fastest := struct{ fixed, insert, remove time.Duration }{math.MaxInt64, math.MaxInt64, math.MaxInt64}
	var now speed
	for round := 0; round < rounds || len(now.slipped(recorded)) > 0 && round < most; round++ {
		runtime.GC()
		fastest.fixed = min(fastest.fixed, fixedWork(t, 4*services))
		runtime.GC()
		insert, remove, objects, bytes := controlPlane(t, ss, es)
		fastest.insert, fastest.remove = min(fastest.insert, insert), min(fastest.remove, remove)
		now = speed{float64(fastest.insert) / float64(fastest.fixed), float64(fastest.remove) / float64(fastest.fixed), objects, bytes}
	}
	t.Logf("%v; the fixed piece of work takes %v", now, fastest.fixed)
	if *updateSpeed {
		if err := errors.Join(os.MkdirAll("testdata", 0o755), os.WriteFile(file, []byte(now.String()+"\n"), 0o644)); err != nil {
			t.Fatal(err)
		}
		return
	}
	for _, what := range now.slipped(recorded) {
		t.Errorf("slower by more than a tenth than %s says: %s", file, what)
	}
}

// threadTime is what this thread has computed.
func threadTime(t *testing.T) time.Duration {
	t.Helper()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now); err != nil {
		t.Fatal(err)
	}
	return time.Duration(now.Nano())
}

// fixedWork is work of the kind that a control plane does: maps by names, small objects and text. It never changes.
func fixedWork(t *testing.T, n int) time.Duration {
	type object struct {
		name types.NamespacedName
		next *object
		data [20]uint64
	}
	start := threadTime(t)
	byName, byNumber := map[types.NamespacedName]*object{}, map[uint64]*object{}
	var last *object
	for i := range n {
		o := &object{name: types.NamespacedName{Namespace: "namespace", Name: fmt.Sprintf("name-%d", i)}, next: last}
		o.data[i%20] = uint64(i) * 0x9e3779b97f4a7c15
		byName[o.name], byNumber[o.data[i%20]] = o, o
		last = o
	}
	for o := last; o != nil; o = o.next {
		delete(byName, o.name)
	}
	runtime.KeepAlive(byNumber)
	return threadTime(t) - start
}

// controlPlane inserts and removes Services, without maps of the kernel.
func controlPlane(t *testing.T, ss []*v1.Service, es []*discoveryv1.EndpointSlice) (insert, remove time.Duration, objects, bytes float64) {
	sizes := lbmap.Sizes{Frontends: 1 << 17, Services: 1 << 16, Backends: 1 << 16, Slots: 1 << 18}.WithDefaults()
	tables := lbmap.NewFakeTables(sizes)
	tables.Frontends = noFrontends{tables.Frontends.(*lbmap.FakeFrontends)}
	w := New(tables, Options{Sizes: sizes, Clock: clocktesting.NewFakePassiveClock(time.Unix(1700000000, 0)), Wait: func() {}, Guard: func() error { return nil }})
	w.Format(1)
	p, err := proxier.New(proxier.Options{NodeName: "node1", Tier: writing{w}, Runner: proxier.DefaultRunnerOptions()})
	if err != nil {
		t.Fatal(err)
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	sync := func() {
		if err := p.Sync(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	sync()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := threadTime(t)
	for i := range ss {
		p.OnServiceAdd(ss[i])
		p.OnEndpointSliceAdd(es[i])
	}
	sync()
	insert = threadTime(t) - start
	runtime.ReadMemStats(&after)
	start = threadTime(t)
	for i := range ss {
		p.OnEndpointSliceDelete(es[i])
		p.OnServiceDelete(ss[i])
	}
	sync()
	n := float64(len(ss))
	return insert, threadTime(t) - start, float64(after.Mallocs-before.Mallocs) / n, float64(after.TotalAlloc-before.TotalAlloc) / n
}

// writing is a tier of a writer alone.
type writing struct{ *Writer }

func (t writing) Sync(_ context.Context, u proxier.Update) error {
	_, err := t.Writer.Sync(u)
	return err
}

func (writing) Cleanup(context.Context) error { return nil }

func (writing) Supports(d *proxier.Decision, f *proxier.Frontend) error { return Supports(d, f) }

// processor is the model of this machine's processor, as a part of a file's name.
func processor(t *testing.T) string {
	t.Helper()
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if key, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.Trim(regexp.MustCompile(`[^A-Za-z0-9]+`).ReplaceAllString(value, "-"), "-")
		}
	}
	return runtime.GOARCH
}
