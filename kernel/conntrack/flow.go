// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// ErrInterrupted means that the table changed in a way that may have hidden entries
// from a dump.
var ErrInterrupted = errors.New("dump was interrupted by changes")

// Flow is what matters here of an entry of conntrack.
type Flow struct {
	Protocol inet.Protocol
	// Zone is that of the entry, or of one of its directions. 0 is the zone of
	// everybody; in others are connections that somebody keeps apart.
	Zone uint16
	// ID tells the entry from a later one with the same addresses.
	ID uint32
	// Source and Destination are what the client sends from and to.
	Source, Destination netip.AddrPort
	// Replies is where replies come from: the backend, or the Destination if
	// nobody translated it.
	Replies netip.AddrPort
}

// Translated says whether the destination became another.
func (f *Flow) Translated() bool { return f.Replies != f.Destination }

func (f Flow) String() string {
	text := fmt.Sprintf("%s %s -> %s", f.Protocol, f.Source, f.Destination)
	if f.Translated() {
		text += " -> " + f.Replies.String()
	}
	return text
}

// Table is a conntrack table.
type Table interface {
	// Flows lists the UDP flows of a family, and may list others. An error is the
	// last thing it yields: ErrInterrupted if entries may be missing, in which case
	// those listed are right nevertheless.
	Flows(ctx context.Context, family inet.Family) iter.Seq2[Flow, error]
	// Delete deletes exactly these entries of zone 0, and counts those that were
	// still there. An error about one does not keep the others.
	Delete(ctx context.Context, flows []Flow) (deleted int, err error)
}
