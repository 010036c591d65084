// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netns_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestOwn: the thread's namespace has the cookie that the thread reads, and Do stays in it.
func TestOwn(t *testing.T) {
	own, err := netns.Own()
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	of, err := own.Cookie()
	if err != nil {
		t.Fatal(err)
	}
	want, err := netns.Cookie()
	if err != nil || of != want {
		t.Errorf("cookie %d, error %v, want %d", of, err, want)
	}
	failure := errors.New("failed")
	if err := own.Do(func() error { return failure }); err != failure {
		t.Errorf("Do returned %v", err)
	}
}

func TestOpenErrors(t *testing.T) {
	if _, err := netns.Open("/proc/self/nothing"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing path: %v", err)
	}
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n, err := netns.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if _, err := n.Cookie(); err == nil {
		t.Error("an ordinary file has a cookie")
	}
	if err := (netns.Namespace{}).Close(); err != nil {
		t.Errorf("close the zero value: %v", err)
	}
}

// TestOther: each namespace has its own cookie, wherever it is read from, and Do enters it.
func TestOther(t *testing.T) {
	node := lab.NewT(t).Node("node1")
	n, err := netns.Open(node.NetNSPath())
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	of, err := n.Cookie()
	if err != nil {
		t.Fatal(err)
	}
	own, err := netns.Cookie()
	if err != nil {
		t.Fatal(err)
	}
	var inside, entered uint64
	if err := node.Do(func() (err error) { inside, err = netns.Cookie(); return err }); err != nil {
		t.Fatal(err)
	}
	if err := n.Do(func() (err error) { entered, err = netns.Cookie(); return err }); err != nil {
		t.Fatal(err)
	}
	if of != inside || of != entered {
		t.Errorf("cookie %d, read inside %d, entered %d", of, inside, entered)
	}
	if own != 0 && of == own {
		t.Errorf("two namespaces have the cookie %d", own)
	}
}

// TestMainThread: the main thread never enters another namespace, because /proc/<pid>/ns/net shows
// the main thread's.
func TestMainThread(t *testing.T) {
	node := lab.NewT(t).Node("node1")
	n, err := netns.Open(node.NetNSPath())
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	const ofProcess = "/proc/self/ns/net"
	want, err := os.Readlink(ofProcess)
	if err != nil {
		t.Fatal(err)
	}
	var group errgroup.Group
	for range 200 {
		group.Go(func() error {
			return n.Do(func() error {
				if got, err := os.Readlink(ofProcess); err != nil || got != want {
					return fmt.Errorf("the process is in %s, error %v, want %s", got, err, want)
				}
				return nil
			})
		})
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
	if got, err := os.Readlink(ofProcess); err != nil || got != want {
		t.Errorf("afterwards the process is in %s, error %v, want %s", got, err, want)
	}
}
