// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nfacct

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

// TestKernel: a counter is created once, counts while a rule references it, and can be deleted when
// no rule does. Foreign counters stay.
func TestKernel(t *testing.T) {
	const name, others = "test_pkts", "others_pkts"
	n := lab.NewT(t).Node("node1")
	if err := n.Do(func() error { return Kernel{}.Ensure(others) }); errors.Is(err, ErrNotSupported) {
		lab.SkipOrFailModule(t, err)
	} else if err != nil {
		t.Fatal(err)
	}
	do := func(what string, want error, f func() error) {
		t.Helper()
		if err := n.Do(f); !errors.Is(err, want) {
			t.Fatalf("%s: %v, want %v", what, err, want)
		}
	}
	packets := func(want uint64) {
		t.Helper()
		do("read", nil, func() error {
			got, err := Kernel{}.Packets(name)
			if err == nil && got != want {
				t.Errorf("the counter has %d packets, want %d", got, want)
			}
			return err
		})
	}
	ensure := func() error { return Kernel{}.Ensure(name) }
	remove := func() error { return Kernel{}.Delete(name) }

	do("read one that is not there", ErrNotFound, func() error { _, err := Kernel{}.Packets(name); return err })
	do("delete one that is not there", nil, remove)
	do("make", nil, ensure)
	packets(0)

	// The legacy variant releases the counter with the rule.
	if out, err := n.Command(t.Context(), "iptables-legacy", "-A", "OUTPUT", "-p", "icmp", "-m", "nfacct", "--nfacct-name", name).CombinedOutput(); err != nil {
		lab.SkipOrFailModule(t, errors.Join(err, errors.New(string(out))))
	}
	for range 3 {
		if err := n.Ping(t.Context(), n.Addr4); err != nil {
			t.Fatal(err)
		}
	}
	packets(6) // with the replies
	do("make one that is there", nil, ensure)
	packets(6)
	do("delete one in use", ErrInUse, remove)
	if out, err := n.Command(t.Context(), "iptables-legacy", "-F", "OUTPUT").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	do("delete", nil, remove)
	do("read one that is gone", ErrNotFound, func() error { _, err := Kernel{}.Packets(name); return err })
	do("read a foreign one", nil, func() error { _, err := Kernel{}.Packets(others); return err })
}

// TestNames: names that would address all counters, or another one, are refused.
func TestNames(t *testing.T) {
	for _, name := range []string{"", strings.Repeat("x", MaxNameLen+1)} {
		if err := (Kernel{}).Delete(name); err == nil || !strings.Contains(err.Error(), "bytes") {
			t.Errorf("%q: %v", name, err)
		}
	}
}
