// SPDX-License-Identifier: Apache-2.0

//go:build linux

package xtables

import (
	"context"
	"os"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

var bg = context.Background()

var (
	variants = []Variant{NFT, Legacy}
	families = []inet.Family{inet.IPv4, inet.IPv6}
)

// node is a lab node with empty tables, and the programs of a variant.
type node struct {
	tb    testing.TB
	at    *lab.Node
	tools *Tools
}

func newNode(tb testing.TB, v Variant) *node {
	tb.Helper()
	n := &node{tb: tb, at: lab.NewT(tb).Node("node1")}
	n.tools = n.open(v)
	for _, f := range families {
		if err := n.at.Do(func() error { return n.tools.Usable(bg, f) }); err != nil {
			lab.SkipOrFail(tb, err)
		}
	}
	return n
}

func (n *node) open(v Variant) *Tools {
	n.tb.Helper()
	t, err := New(v)
	if err != nil {
		lab.SkipOrFail(n.tb, err)
	}
	return t
}

// do runs fn in the node's network namespace.
func (n *node) do(fn func() error) {
	n.tb.Helper()
	if err := n.at.Do(fn); err != nil {
		n.tb.Fatal(err)
	}
}

func (n *node) restore(f inet.Family, input string) {
	n.tb.Helper()
	n.do(func() error { return n.tools.Restore(bg, f, []byte(input)) })
}

func (n *node) save(f inet.Family, table string) (t *Table) {
	n.tb.Helper()
	n.do(func() (err error) {
		t, err = n.tools.Save(bg, f, table)
		return err
	})
	return t
}

// forAll runs a test with each variant.
func forAll(t *testing.T, fn func(*testing.T, *node)) {
	for _, v := range variants {
		t.Run(v.String(), func(t *testing.T) { fn(t, newNode(t, v)) })
	}
}
