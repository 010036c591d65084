// SPDX-License-Identifier: Apache-2.0

package iptables

// watch knows whether the rules are as they were when they were read last, but for what
// was written since. Then they need not be read again, which takes seconds where there
// are many. Not every variant can tell.
type watch struct {
	tools Tools
	at    uint32
	own   bool // nobody else has changed anything
}

// begin is called before rules are read.
func (w *watch) begin() { w.at, w.own = w.generation() }

func (w *watch) generation() (uint32, bool) {
	n, ok, err := w.tools.Generation()
	return n, ok && err == nil
}

// before is called before something is written.
func (w *watch) before() {
	if n, ok := w.generation(); !ok || n != w.at {
		w.own = false
	}
}

// after is called when so many tables were written, or might have been.
func (w *watch) after(tables int, err error) {
	n, ok := w.generation()
	w.own = w.own && ok && err == nil && n == w.at+uint32(tables)
	w.at = n
}

// unchanged says that all changes since begin were ours, as of now.
func (w *watch) unchanged() bool {
	w.before()
	return w.own
}
