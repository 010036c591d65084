// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"sync"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
)

const (
	keptDisruptions  = 1024 // of all Services
	shownDisruptions = 5
)

// Disruptions are the last changes of Maglev tables. The zero value is ready for use.
type Disruptions struct {
	mu   sync.Mutex
	last []proxier.Disruption // a ring
	next int
}

// Add adds a change.
func (l *Disruptions) Add(d proxier.Disruption) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.last) < keptDisruptions {
		l.last = append(l.last, d)
		return
	}
	l.last[l.next] = d
	l.next = (l.next + 1) % keptDisruptions
}

// Notes are the last changes of a service port, newest first.
func (l *Disruptions) Notes(f *Frontend, protocol string, now time.Time) (notes []string) {
	if f == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.last {
		d := &l.last[(l.next+len(l.last)-1-i)%len(l.last)]
		if d.Name.Namespace != f.Namespace || d.Name.Name != f.Name || d.Name.Port != f.Port || d.Name.Protocol.String() != protocol {
			continue
		}
		notes = append(notes, fmt.Sprintf("%s ago, a change of the Maglev table of set %s (%d slots) moved %.2f %% of connections without state to other endpoints",
			now.Sub(d.At).Round(time.Second), d.Set, d.Slots, 100*d.Moved))
		if len(notes) == shownDisruptions {
			break
		}
	}
	return notes
}
