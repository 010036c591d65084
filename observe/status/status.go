// SPDX-License-Identifier: Apache-2.0

// Package status is what an operator asks first of a kube-proxy: which mode runs and why, whether
// Services work, how old its state is, and what serves how many Services.
package status

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tandem-proxy/tandem/observe/health"
	"github.com/tandem-proxy/tandem/proxier"
)

// Path is where kube-proxy answers, on its own node only.
const Path = "/debug/status"

// Status is the answer, as JSON. Later versions may add fields. They do not rename fields or
// change their meaning.
type Status struct {
	Node    string `json:"node"`
	Version string `json:"version"`
	// Mode is the running mode, Configured the one of the configuration, Reasons are why that
	// led to this, and Degraded what the mode cannot do here.
	Mode       string `json:"mode"`
	Configured string `json:"configuredMode"`
	// ConfiguredBy is the flag, or the file and line, that has Configured; or "default".
	ConfiguredBy string    `json:"configuredBy"`
	Reasons      []string  `json:"reasons"`
	Degraded     []string  `json:"degraded"`
	Started      time.Time `json:"started"`
	// Source is where objects come from: the URL of the API server, or a directory.
	Source string `json:"source"`
	// LastEvents is when the API server last sent an event or a bookmark, which comes each minute, of each
	// resource that is watched; empty without an API server.
	LastEvents map[string]time.Time `json:"lastEvents"`
	// Checks are the conditions of readiness; the process is ready if all are OK.
	Ready  bool           `json:"ready"`
	Checks []health.Check `json:"checks"`
	// LastSync is the newest one, and LastSuccess when one succeeded; null for none.
	LastSync    *Sync      `json:"lastSync"`
	LastSuccess *time.Time `json:"lastSuccessfulSync"`
	// ServicePorts are those of all Services, by what serves them.
	ServicePorts []Share `json:"servicePorts"`
	// Direct is null where direct server return is neither configured nor asked for by a Service.
	Direct *Direct `json:"directServerReturn"`
	// Problems were reported since the start, by kind of object and reason.
	Problems []Problem `json:"problems"`
}

// Sync brought the kernel in line with the objects.
type Sync struct {
	End      time.Time `json:"end"`
	Duration float64   `json:"durationSeconds"`
	// Full says that all service ports were compared with the kernel.
	Full  bool   `json:"full"`
	Error string `json:"error"` // empty if it succeeded
}

// Share is how many service ports have frontends that these datapaths serve.
type Share struct {
	// Datapaths are names of modes; none if nothing serves some frontend.
	Datapaths []string `json:"datapaths"`
	Count     int      `json:"count"`
}

// Direct is how connections of clients outside go to endpoints on other nodes that answer them directly.
type Direct struct {
	// Dispatch is what this node sends packets in: ipip, geneve or opt.
	Dispatch string `json:"dispatch"`
	// Endpoints are those on other nodes, and Ready those whose nodes take it; connections to the others are masqueraded.
	Endpoints int `json:"endpoints"`
	Ready     int `json:"ready"`
}

// Problem counts reports, including repetitions that are not logged.
type Problem struct {
	Kind   string `json:"kind"`
	Reason string `json:"reason"`
	Count  int    `json:"count"`
}

// Recorder notes what happens. It implements proxier.Observer. The zero value is ready for use, by
// several goroutines.
type Recorder struct {
	mu          sync.Mutex
	lastSync    *Sync
	lastSuccess time.Time
	problems    map[Problem]int // by those without a count
}

var _ proxier.Observer = (*Recorder)(nil)

// Queued implements proxier.Observer.
func (*Recorder) Queued(time.Time) {}

// Synced implements proxier.Observer.
func (r *Recorder) Synced(info proxier.SyncInfo) {
	s := &Sync{End: info.End, Duration: info.End.Sub(info.Start).Seconds(), Full: info.Full}
	if info.Err != nil {
		s.Error = info.Err.Error()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lastSync = s
	if info.Err == nil {
		r.lastSuccess = info.End
	}
}

// Problem notes one that was reported.
func (r *Recorder) Problem(kind, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.problems == nil {
		r.problems = map[Problem]int{}
	}
	r.problems[Problem{Kind: kind, Reason: reason}]++
}

// Fill sets what was noted.
func (r *Recorder) Fill(s *Status) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s.LastSync, s.LastSuccess = r.lastSync, known(r.lastSuccess)
	s.Problems = []Problem{}
	for p, n := range r.problems {
		p.Count = n
		s.Problems = append(s.Problems, p)
	}
	slices.SortFunc(s.Problems, func(a, b Problem) int {
		return cmp.Or(b.Count-a.Count, strings.Compare(a.Kind, b.Kind), strings.Compare(a.Reason, b.Reason))
	})
}

func known(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// ServesFunc returns what serves a frontend for clients of an origin; empty for nothing.
type ServesFunc func(*proxier.Decision, *proxier.Frontend, proxier.Origin) string

// Shares counts service ports by what serves their frontends, the largest share first.
// Service ports without a frontend of their own are left out. Nothing serves those that are unplaced.
func Shares(all []proxier.PortChange, unplaced func(*proxier.Decision) bool, serves ServesFunc) []Share {
	counts := map[string]int{}
	for _, change := range all {
		d := change.New
		by := map[string]bool{}
		for i := range d.Frontends {
			if f := &d.Frontends[i]; f.Conflict == nil {
				for o := range proxier.Origins {
					by[serves(d, f, o)] = true
				}
			}
		}
		switch {
		case len(by) == 0:
		case by[""] || unplaced(d):
			counts[""]++
		default:
			counts[strings.Join(slices.Sorted(maps.Keys(by)), " ")]++
		}
	}
	list := []Share{}
	for names, n := range counts {
		list = append(list, Share{Datapaths: strings.Fields(names), Count: n})
	}
	slices.SortFunc(list, func(a, b Share) int {
		return cmp.Or(b.Count-a.Count, slices.Compare(a.Datapaths, b.Datapaths))
	})
	return list
}
