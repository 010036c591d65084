// SPDX-License-Identifier: Apache-2.0

package iptables

import "github.com/tandem-proxy/tandem/proxier"

// watch knows whether the rules of a family are as they were when they were read last, but
// for what was written since. Then they need not be read again, which takes seconds where
// there are many. The kernel counts the changes of both families together, and does not
// tell whose one was; not every variant can tell at all.
type watch struct {
	tools Tools
	at    uint32
	own   [proxier.Families]bool // nobody else has changed anything since it was read
}

// begin is called before the rules of a family are read.
func (w *watch) begin(f proxier.Family) {
	n, ok := w.generation()
	w.expect(n, ok, w.at)
	w.at, w.own[f] = n, ok
}

func (w *watch) generation() (uint32, bool) {
	n, ok, err := w.tools.Generation()
	return n, ok && err == nil
}

// expect notes that somebody else changed something, if the generation is another.
func (w *watch) expect(n uint32, ok bool, want uint32) {
	if !ok || n != want {
		w.own = [proxier.Families]bool{}
	}
}

// before is called before something is written.
func (w *watch) before() {
	n, ok := w.generation()
	w.expect(n, ok, w.at)
}

// after is called when so many tables were written, or when something was refused: then
// none were, or some, which is not known.
func (w *watch) after(tables int, err error) {
	if err != nil {
		tables = 0
	}
	n, ok := w.generation()
	w.expect(n, ok, w.at+uint32(tables))
	w.at = n
}

// unchanged says that all changes since the family was read were ours, as of now.
func (w *watch) unchanged(f proxier.Family) bool {
	w.before()
	return w.own[f]
}
