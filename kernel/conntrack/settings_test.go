// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/sysctl"
	"github.com/tandem-proxy/tandem/test/lab"
)

const netfilter = "proc/sys/net/netfilter/"

// kernel is a directory with settings, as a node has them; more overrides them, and an
// empty value takes one away.
func kernel(t *testing.T, more map[string]string) sysctl.Root {
	t.Helper()
	root := t.TempDir()
	settings := map[string]string{
		"sys/devices/system/cpu/online":                    "0-3,6",
		"sys/module/nf_conntrack/parameters/hashsize":      "16384",
		netfilter + "nf_conntrack_max":                     "65536",
		netfilter + "nf_conntrack_tcp_timeout_established": "432000",
		netfilter + "nf_conntrack_tcp_timeout_close_wait":  "60",
		netfilter + "nf_conntrack_udp_timeout":             "30",
		netfilter + "nf_conntrack_udp_timeout_stream":      "120",
		netfilter + "nf_conntrack_tcp_be_liberal":          "0",
	}
	for name, value := range more {
		settings[name] = value
	}
	for name, value := range settings {
		if value == "" {
			continue
		}
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(value+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return sysctl.Root(root)
}

func TestRoom(t *testing.T) {
	for _, test := range []struct {
		limit, used string
		want        int
	}{{"65536", "768", 32000}, {"65536", "40000", 0}, {"0", "40000", math.MaxInt}} {
		root := kernel(t, map[string]string{netfilter + "nf_conntrack_max": test.limit, netfilter + "nf_conntrack_count": test.used})
		if room, err := conntrack.Room(root); err != nil || room != test.want {
			t.Errorf("%s of %s: room for %d, error %v, want %d", test.used, test.limit, room, err, test.want)
		}
	}
	if _, err := conntrack.Room(kernel(t, nil)); err == nil {
		t.Error("no error without the number of entries")
	}
}

func TestSettings(t *testing.T) {
	const limit, buckets = netfilter + "nf_conntrack_max", "sys/module/nf_conntrack/parameters/hashsize"
	asUpstream := conntrack.Settings{MaxPerCPU: 32768, Min: 131072, TCPEstablished: 24 * time.Hour, TCPCloseWait: time.Hour}
	for _, test := range []struct {
		name     string
		settings conntrack.Settings
		kernel   map[string]string
		want     map[string]string
		skipped  string
		fail     string
	}{
		{
			name: "upstream's defaults", settings: asUpstream,
			want: map[string]string{
				limit: "163840", buckets: "40960",
				netfilter + "nf_conntrack_tcp_timeout_established": "86400", netfilter + "nf_conntrack_tcp_timeout_close_wait": "3600",
				netfilter + "nf_conntrack_udp_timeout": "30", netfilter + "nf_conntrack_tcp_be_liberal": "0",
			},
		},
		{name: "at least", settings: conntrack.Settings{MaxPerCPU: 10, Min: 131072}, want: map[string]string{limit: "131072", buckets: "32768"}},
		{name: "at most", settings: conntrack.Settings{MaxPerCPU: 1 << 30}, want: map[string]string{limit: "1048576", buckets: "262144"}},
		{name: "what is asked for by name", settings: conntrack.Settings{MaxPerCPU: 1 << 30, Min: 3 << 20}, want: map[string]string{limit: "3145728"}},
		{name: "left alone", settings: conntrack.Settings{Min: 131072}, want: map[string]string{limit: "65536", buckets: "16384", netfilter + "nf_conntrack_tcp_timeout_established": "432000"}},
		{name: "more buckets than needed", settings: asUpstream, kernel: map[string]string{buckets: "99999"}, want: map[string]string{buckets: "99999"}},
		{
			name: "everything else", settings: conntrack.Settings{UDP: 45 * time.Second, UDPStream: 200 * time.Millisecond, TCPBeLiberal: true},
			want: map[string]string{netfilter + "nf_conntrack_udp_timeout": "45", netfilter + "nf_conntrack_udp_timeout_stream": "1", netfilter + "nf_conntrack_tcp_be_liberal": "1"},
		},
		{
			name: "no conntrack", settings: asUpstream,
			kernel: map[string]string{limit: "", netfilter + "nf_conntrack_tcp_timeout_established": ""},
			want:   map[string]string{netfilter + "nf_conntrack_tcp_timeout_close_wait": "3600"}, // all that can be done is
			fail:   "nf_conntrack_tcp_timeout_established: no such file",
		},
		{
			name: "no way to the buckets", settings: asUpstream, kernel: map[string]string{buckets: ""},
			want: map[string]string{limit: "163840"}, skipped: "hashsize: no such file",
		},
		{name: "CPUs that make no sense", settings: conntrack.Settings{MaxPerCPU: 1, Min: 77777}, kernel: map[string]string{"sys/devices/system/cpu/online": "some"}, want: map[string]string{limit: "77777"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			root := kernel(t, test.kernel)
			skipped, err := test.settings.Apply(t.Context(), root)
			if test.fail == "" && err != nil || test.fail != "" && (err == nil || !strings.Contains(err.Error(), test.fail)) {
				t.Errorf("error %v, want %q", err, test.fail)
			}
			if (test.skipped != "") != (len(skipped) > 0) || len(skipped) > 0 && !strings.Contains(skipped[0].Error(), test.skipped) {
				t.Errorf("skipped %v, want %q", skipped, test.skipped)
			}
			got := map[string]string{}
			for name := range test.want {
				got[name], _ = root.Get(name)
			}
			if d := cmp.Diff(test.want, got); d != "" {
				t.Errorf("settings (-want +got):\n%s", d)
			}
		})
	}
}

// TestSettingsOfNamespace changes those of a real node. How many flows there can be is
// not its own to say, and is only said.
func TestSettingsOfNamespace(t *testing.T) {
	n := lab.NewT(t, lab.Options{}).Node("node1")
	const host = sysctl.Root("/")
	conntrack.Ready(t.Context(), host) // asks the kernel, and changes nothing
	before, err := host.Get(netfilter + "nf_conntrack_max")
	if err != nil {
		lab.SkipOrFail(t, fmt.Errorf("the kernel's conntrack: %w", err))
	}
	s := conntrack.Settings{MaxPerCPU: 1 << 30, TCPEstablished: 1234 * time.Second, TCPCloseWait: 56 * time.Second, UDP: 7 * time.Second, UDPStream: 89 * time.Second, TCPBeLiberal: true}
	for i := range 2 {
		if err := n.Do(func() error {
			if !host.Foreign(netfilter + "nf_conntrack_max") {
				return errors.New("this namespace could change the limit of the machine; nothing is written")
			}
			skipped, err := s.Apply(context.Background(), host)
			if err != nil {
				return err
			}
			if before != "1048576" && (len(skipped) != 1 || !strings.Contains(skipped[0].Error(), "initial network namespace")) {
				t.Errorf("skipped %v", skipped)
			}
			for name, want := range map[string]string{
				"tcp_timeout_established": "1234", "tcp_timeout_close_wait": "56", "udp_timeout": "7", "udp_timeout_stream": "89", "tcp_be_liberal": "1",
			} {
				if got, err := host.Get(netfilter + "nf_conntrack_" + name); err != nil || got != want {
					t.Errorf("run %d: %s is %s, want %s, error %v", i, name, got, want, err)
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	if after, err := host.Get(netfilter + "nf_conntrack_max"); err != nil || after != before {
		t.Errorf("the machine's limit was %s, and is %s, error %v", before, after, err)
	}
}
