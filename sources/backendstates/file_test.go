// SPDX-License-Identifier: Apache-2.0

//go:build linux

package backendstates

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func entry(backend, service string, state proxier.BackendState, lasts time.Duration) Entry {
	e := Entry{Service: service, State: state, Since: now}
	if at, err := netip.ParseAddrPort(backend); err == nil {
		e.Address, e.Port = at.Addr(), at.Port()
	} else {
		e.Address = netip.MustParseAddr(backend)
	}
	if lasts != 0 {
		e.Until = now.Add(lasts)
	}
	return e
}

func text(list []Entry) string {
	var words []string
	for _, e := range list {
		words = append(words, strings.TrimSpace(fmt.Sprint(e.Backend(), " ", e.State, " ", e.Service)))
	}
	return strings.Join(words, ", ")
}

func wants(t *testing.T, dir string, at time.Time, want string) {
	t.Helper()
	list, err := Load(dir, at)
	if err != nil || text(list) != want {
		t.Errorf("%q, error %v; want %q", text(list), err, want)
	}
}

func TestSetAndRemove(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	wants(t, dir, now, "")
	set := func(e Entry) {
		t.Helper()
		if err := Set(dir, e, now); err != nil {
			t.Fatal(err)
		}
	}
	set(entry("10.0.0.2:80", "", proxier.MaintenanceState, time.Minute))
	set(entry("fd00::1", "ns/a", proxier.QuarantinedState, 0))
	set(entry("10.0.0.2", "", proxier.MaintenanceState, 0))
	set(entry("10.0.0.2:80", "ns/a", proxier.MaintenanceState, 0))
	set(entry("10.0.0.2", "", proxier.QuarantinedState, 0)) // in place of the other
	wants(t, dir, now, "10.0.0.2 quarantined, 10.0.0.2:80 maintenance, 10.0.0.2:80 maintenance ns/a, fd00::1 quarantined ns/a")
	wants(t, dir, now.Add(time.Minute), "10.0.0.2 quarantined, 10.0.0.2:80 maintenance ns/a, fd00::1 quarantined ns/a")
	for i, want := range []bool{true, false} {
		if found, err := Remove(dir, entry("10.0.0.2", "", proxier.ActiveState, 0), now); err != nil || found != want {
			t.Errorf("removal %d: found %v, %v", i, found, err)
		}
	}
	wants(t, dir, now, "10.0.0.2:80 maintenance, 10.0.0.2:80 maintenance ns/a, fd00::1 quarantined ns/a")
	if files, err := os.ReadDir(dir); err != nil || len(files) != 2 {
		t.Errorf("the directory has %v: %v", files, err)
	}
	list, _ := Load(dir, now)
	if o := Overrides(list); o[0].Service.Name != "a" || o[len(o)-1].Service.Name != "" {
		t.Errorf("overrides are not in the order of precedence: %v", o)
	}
}

// TestSetConcurrently: of commands at the same time none is lost.
func TestSetConcurrently(t *testing.T) {
	dir := t.TempDir()
	const commands = 50
	var all sync.WaitGroup
	for i := range commands {
		all.Go(func() {
			if err := Set(dir, entry(fmt.Sprintf("10.0.0.%d", i+1), "", proxier.MaintenanceState, 0), now); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if list, err := Load(dir, now); err != nil || len(list) != commands {
		t.Errorf("%d entries, %v", len(list), err)
	}
}

func TestLoadRefuses(t *testing.T) {
	many := strings.Repeat(`{"address": "10.0.0.1", "state": "maintenance"},`, MaxEntries+1)
	for name, test := range map[string]struct {
		text, want string
		mode       os.FileMode
	}{
		"no JSON":       {text: "backends:", want: "invalid character"},
		"no address":    {text: `{"backends": [{"state": "maintenance"}]}`, want: "backends[0]: address: there is none"},
		"an address":    {text: `{"backends": [{"address": "10.0.0.300", "state": "maintenance"}]}`, want: "10.0.0.300"},
		"a zone":        {text: `{"backends": [{"address": "fe80::1%eth0", "state": "maintenance"}]}`, want: "address: fe80::1%eth0 is no backend's"},
		"a port":        {text: `{"backends": [{"address": "10.0.0.1", "port": 65536, "state": "maintenance"}]}`, want: "65536"},
		"no state":      {text: `{"backends": [{"address": "10.0.0.1"}]}`, want: "backends[0]: state: there is none"},
		"a state":       {text: `{"backends": [{"address": "10.0.0.1", "state": "gone"}]}`, want: `unknown state "gone": want maintenance or quarantined`},
		"a Service":     {text: `{"backends": [{"address": "10.0.0.1", "state": "maintenance", "service": "web"}]}`, want: `service "web" is not NAMESPACE/NAME`},
		"too many":      {text: `{"backends": [` + strings.TrimSuffix(many, ",") + "]}", want: "has 1025 backends; the limit is 1024"},
		"too large":     {text: strings.Repeat(" ", maxSize+1), want: "more than 1048576 bytes"},
		"of the group":  {text: "{}", mode: 0o664, want: "users other than root can write it"},
		"of the others": {text: "{}", mode: 0o646, want: "users other than root can write it"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), FileName)
			if err := os.WriteFile(path, []byte(test.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if test.mode != 0 {
				if err := os.Chmod(path, test.mode); err != nil {
					t.Fatal(err)
				}
			}
			if list, err := Load(filepath.Dir(path), now); err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), path) {
				t.Errorf("entries %v, error %v; want %q", list, err, test.want)
			}
			if err := Set(filepath.Dir(path), entry("10.0.0.1", "", proxier.MaintenanceState, 0), now); err == nil {
				t.Error("a command overwrites it")
			}
		})
	}
	dir := t.TempDir()
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, FileName)); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(dir, now); err == nil {
		t.Error("a symbolic link is followed")
	}
}

// TestWatch: changes are told, in a directory that appears later as well; a file that cannot be read changes nothing, and states
// end meanwhile.
func TestWatch(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "states")
	told := make(chan string)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		Watch(ctx, dir, clock.RealClock{}, nil, func(list []Entry) {
			select {
			case told <- text(list):
			case <-ctx.Done():
			}
		})
	}()
	defer func() { cancel(); <-done }()
	next := func(want string) {
		t.Helper()
		select {
		case got := <-told:
			if got != want {
				t.Errorf("told %q, want %q", got, want)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("nothing was told, want %q", want)
		}
	}
	set := func(backend string, lasts time.Duration) {
		t.Helper()
		e := entry(backend, "", proxier.MaintenanceState, 0)
		if lasts > 0 {
			e.Until = time.Now().Add(lasts)
		}
		if err := Set(dir, e, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	set("10.0.0.1", 0)
	next("10.0.0.1 maintenance")
	set("10.0.0.2", 3*time.Second) // long enough to be told on a slow disk
	next("10.0.0.1 maintenance, 10.0.0.2 maintenance")
	path := filepath.Join(dir, FileName)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, good[:len(good)/2], 0o644); err != nil {
		t.Fatal(err)
	}
	next("10.0.0.1 maintenance") // the other one has ended
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	next("")
}

func TestSame(t *testing.T) {
	a := entry("10.0.0.1:80", "ns/a", proxier.MaintenanceState, 0)
	for _, b := range []Entry{entry("10.0.0.2:80", "ns/a", proxier.MaintenanceState, 0), entry("10.0.0.1", "ns/a", proxier.MaintenanceState, 0), entry("10.0.0.1:80", "", proxier.MaintenanceState, 0)} {
		if a.Same(&b) {
			t.Errorf("%v is the same as %v", a, b)
		}
	}
	if b := entry("10.0.0.1:80", "ns/a", proxier.QuarantinedState, time.Hour); !a.Same(&b) {
		t.Errorf("%v is not the same as %v", a, b)
	}
}
