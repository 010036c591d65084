// SPDX-License-Identifier: Apache-2.0

//go:build linux

package vm_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/vm"
)

// TestMachine tests one kernel with a command, a guest that crashes, one that does not end, and
// go test.
func TestMachine(t *testing.T) {
	if testing.Short() {
		t.Skip("missing: the time to boot virtual machines in short mode, which make test-all has")
	}
	if runtime.GOARCH != "amd64" {
		t.Skipf("missing: a machine of amd64, this is %s", runtime.GOARCH)
	}
	if err := vm.Available(); err != nil {
		lab.SkipOrFail(t, err)
	}
	ctx := context.Background()
	cache, err := vm.OpenCache()
	if err != nil {
		t.Fatal(err)
	}
	kernel, err := vm.Find("6.1")
	if err != nil {
		t.Fatal(err)
	}
	if err := cache.Fetch(ctx, kernel, false); err != nil {
		lab.SkipOrFail(t, fmt.Errorf("a kernel from Debian: %w", err))
	}
	vmrun := filepath.Join(t.TempDir(), "vmrun")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", vmrun, "./vmrun")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build vmrun: %v\n%s", err, text)
	}
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	run := func(timeout time.Duration, script string) (string, *vm.Result, error) {
		var out bytes.Buffer
		r, err := cache.Run(ctx, vm.Options{
			Kernel: kernel, Init: vmrun, Args: []string{"sh", "-c", script}, Dir: dir, Env: []string{"COLOUR=red"}, Output: &out, Timeout: timeout,
		})
		return out.String(), r, err
	}

	t.Run("command", func(t *testing.T) {
		out, r, err := run(time.Minute, `
			echo $COLOUR; cat job_test.go | head -n 1
			for fs in cgroup2 bpf tracefs; do mount -t $fs | cut -d' ' -f3; done
			ip link add type geneve id 1 remote 192.0.2.1 && ipvsadm -A -t 192.0.2.1:80 -s rr && ipset create s hash:ip,port && lsmod | grep -cE '^(geneve|ip_vs_rr|ip_set_hash_ipport) '
			iptables-nft -t nat -L >/dev/null && iptables-legacy -t nat -L >/dev/null && echo both
			echo wrong >&2
			exit 7`)
		if err != nil {
			t.Fatal(err)
		}
		want := "red\n// SPDX-License-Identifier: Apache-2.0\n/sys/fs/cgroup\n/sys/fs/bpf\n/sys/kernel/tracing\n3\nboth\nwrong\n"
		if out != want || r.Code != 7 || !strings.HasPrefix(r.Release, "6.1.") {
			t.Errorf("%+v, output:\n%s\nwant:\n%s", r, out, want)
		}
		t.Logf("Linux %s booted in %s, the command took %s", r.Release, r.Boot, r.Run)
	})
	t.Run("panic", func(t *testing.T) {
		_, r, err := run(time.Minute, "echo c >/proc/sysrq-trigger")
		if err == nil || !strings.Contains(err.Error(), "sysrq triggered crash") {
			t.Errorf("%+v, %v", r, err)
		}
	})
	t.Run("timeout", func(t *testing.T) {
		_, r, err := run(5*time.Second, "sleep 1000")
		if err == nil || !strings.Contains(err.Error(), "did not end within 5s") {
			t.Errorf("%+v, %v", r, err)
		}
	})
	t.Run("go test", func(t *testing.T) {
		profile := filepath.Join(t.TempDir(), "cover.out")
		c := exec.Command("go", "test", "-count=1", "-v", "-exec="+vmrun+" -v -kernel=6.1 --", "-coverprofile="+profile, "-run=^(TestConnectivity|TestSCTP)$", "../lab")
		c.Env = append(os.Environ(), "CGO_ENABLED=0")
		out, err := c.CombinedOutput()
		for _, want := range []string{"--- PASS: TestConnectivity", "--- PASS: TestSCTP", "Linux 6.1."} {
			if err != nil || !bytes.Contains(out, []byte(want)) {
				t.Fatalf("no %q: %v\n%s", want, err, out)
			}
		}
		if text, err := os.ReadFile(profile); err != nil || !strings.Contains(string(text), "test/lab/lab.go") {
			t.Errorf("coverage: %v\n%s", err, text)
		}
	})
}
