// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"iter"
	"slices"
	"strings"
)

// text is input for iptables-restore: parts of two or three tables. Each table is
// changed at once or not at all.
type text struct{ tables map[string]*tableText }

// tableText is that of one table.
type tableText struct {
	declared []string // chains that are made, or emptied
	lines    []string
	dropped  []string // chains that go, after everything else
}

func newText() *text { return &text{map[string]*tableText{}} }

func (t *text) table(name string) *tableText {
	if t.tables[name] == nil {
		t.tables[name] = &tableText{}
	}
	return t.tables[name]
}

// declare makes a chain, or empties it.
func (t *tableText) declare(chain string) { t.declared = append(t.declared, chain) }

// write has a chain hold these rules.
func (t *tableText) write(chain string, rules []string) {
	t.declare(chain)
	for _, r := range rules {
		t.lines = append(t.lines, "-A "+chain+" "+r)
	}
}

// insert puts a rule in front of a chain.
func (t *tableText) insert(chain, rule string) { t.lines = append(t.lines, "-I "+chain+" 1 "+rule) }

// delete takes a rule out of a chain.
func (t *tableText) delete(chain, rule string) { t.lines = append(t.lines, "-D "+chain+" "+rule) }

// rules counts those that are added to chains of ours.
func (t *tableText) rules() (n int) {
	for _, line := range t.lines {
		if strings.HasPrefix(line, "-A KUBE-") || strings.HasPrefix(line, "-I KUBE-") {
			n++
		}
	}
	return n
}

// drop deletes a chain, whether or not it is there.
func (t *tableText) drop(chain string) {
	t.declare(chain)
	t.dropped = append(t.dropped, chain)
}

// tableOrder is that of texts: what refuses is there before what leads ends.
var tableOrder = []string{"mangle", "filter", "nat"}

// count is how many tables are changed.
func (t *text) count() (n int) {
	for _, part := range t.tables {
		if !part.empty() {
			n++
		}
	}
	return n
}

func (t *tableText) empty() bool { return t == nil || len(t.declared)+len(t.lines) == 0 }

func (t *text) bytes() []byte {
	var b bytes.Buffer
	for _, name := range tableOrder {
		part := t.tables[name]
		if part.empty() {
			continue
		}
		b.WriteString("*" + name + "\n")
		for _, c := range part.declared {
			b.WriteString(":" + c + " - [0:0]\n")
		}
		for _, line := range part.lines {
			b.WriteString(line)
			b.WriteByte('\n')
		}
		for _, c := range part.dropped {
			b.WriteString("-X " + c + "\n")
		}
		b.WriteString("COMMIT\n")
	}
	return b.Bytes()
}

// droppedAt is the chain that a line deletes, counted from 1, or none.
func (t *text) droppedAt(line int) string {
	lines := strings.Split(string(t.bytes()), "\n")
	if line < 1 || line > len(lines) {
		return ""
	}
	chain, ok := strings.CutPrefix(lines[line-1], "-X ")
	if !ok {
		return ""
	}
	return chain
}

// inParts cuts a text that only empties and drops chains. All are emptied before any goes.
func (t *text) inParts(most int) iter.Seq[*text] {
	return func(yield func(*text) bool) {
		for _, name := range tableOrder {
			part := t.tables[name]
			if part == nil {
				continue
			}
			for chains := range slices.Chunk(part.declared, most) {
				one := newText()
				one.table(name).declared = chains
				if !yield(one) {
					return
				}
			}
			for chains := range slices.Chunk(part.dropped, most) {
				one := newText()
				for _, c := range chains {
					one.table(name).drop(c)
				}
				if !yield(one) {
					return
				}
			}
		}
	}
}
