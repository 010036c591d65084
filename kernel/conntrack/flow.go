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

// Flow is a conntrack entry, reduced to the fields that the proxy uses.
type Flow struct {
	Protocol inet.Protocol
	// Zone is the conntrack zone of the entry, or of one of its directions. The proxy
	// works in zone 0, the default; other software uses the other zones.
	Zone uint16
	// ID distinguishes the entry from a later one with the same addresses.
	ID uint32
	// Source and Destination are the tuple of the original direction.
	Source, Destination netip.AddrPort
	// Replies is the source of the reply direction: the backend, or the Destination
	// if it was not translated.
	Replies netip.AddrPort
	// Seen is the destination of the reply direction: the Source, or the address that
	// masquerading (SNAT) shows the backend instead.
	Seen netip.AddrPort
	// Answered says that there was a reply.
	Answered bool
}

// Translated reports whether the destination was translated (DNAT).
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
	// Flows lists the UDP flows of a family. It may list flows of other protocols too.
	// It yields an error last, if any. After ErrInterrupted, entries may be missing,
	// but the listed ones are valid.
	Flows(ctx context.Context, family inet.Family) iter.Seq2[Flow, error]
	// Delete deletes exactly these entries of zone 0 and returns how many still
	// existed. An error for one entry does not stop the others from being deleted.
	Delete(ctx context.Context, flows []Flow) (deleted int, err error)
}
