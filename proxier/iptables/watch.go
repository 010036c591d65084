// SPDX-License-Identifier: Apache-2.0

package iptables

import "github.com/tandem-proxy/tandem/proxier"

// watch finds out whether other programs have changed the rules of a family since they were
// read. If not they need not be read again, which takes seconds where there are many. The
// kernel counts the changes of both families together, without their origin. The legacy
// variant counts nothing.
type watch struct {
	tools Tools
	at    uint32
	own   [proxier.Families]bool // all changes since it was read are this process's
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

// expect notes that another program has changed something, if the generation is unexpected.
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

// after is called when some tables were written, or refused. How many were written before
// one was refused is not known.
func (w *watch) after(tables int, err error) {
	if err != nil {
		tables = 0
	}
	n, ok := w.generation()
	w.expect(n, ok, w.at+uint32(tables))
	w.at = n
}

// unchanged says that other programs have changed nothing since the family was read.
func (w *watch) unchanged(f proxier.Family) bool {
	w.before()
	return w.own[f]
}
