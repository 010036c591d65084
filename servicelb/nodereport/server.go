// SPDX-License-Identifier: Apache-2.0

package nodereport

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"
)

const (
	// MaxWait is how long an answer waits for a newer report.
	MaxWait = 2 * time.Second
	// maxWaiting is how many answers wait at once. Controllers are few, and anybody may ask.
	maxWaiting = 8
	// writeLimit is how long a client may take to read an answer.
	writeLimit = 5 * time.Second
)

// history is how many changes are kept for clients that have an earlier report.
const history = 64

// Server answers with the newest report. It is safe for concurrent use.
type Server struct {
	process string // in versions
	waiting chan struct{}

	mu      sync.Mutex
	number  int // of the report; 0 if there is none
	report  Report
	changes [][]string    // what Services differ in the last reports, the newest last
	newer   chan struct{} // closed once there is a newer report
	ended   bool
}

// NewServer makes a server without a report, which answers 503.
func NewServer() *Server {
	return &Server{process: strconv.FormatInt(time.Now().UnixNano(), 36), waiting: make(chan struct{}, maxWaiting), newer: make(chan struct{})}
}

// Set has the server answer with a report from now on. The report must not be changed any more.
func (s *Server) Set(r Report) {
	s.mu.Lock()
	defer s.mu.Unlock()
	differ := changed(s.report.Services, r.Services)
	if s.number > 0 && len(differ) == 0 && slices.Equal(s.report.Addresses, r.Addresses) && slices.Equal(s.report.Listeners, r.Listeners) && s.report.NoListeners == r.NoListeners {
		return
	}
	s.number++
	s.report, s.changes = r, append(s.changes, differ)
	if len(s.changes) > history {
		s.changes = slices.Delete(s.changes, 0, len(s.changes)-history)
	}
	if !s.ended {
		close(s.newer)
		s.newer = make(chan struct{})
	}
}

// End has no answer wait any more.
func (s *Server) End() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.ended = true
		close(s.newer)
	}
}

// Install adds Path.
func (s *Server) Install(mux *http.ServeMux) {
	mux.HandleFunc("GET "+Path, func(w http.ResponseWriter, r *http.Request) {
		after := r.URL.Query().Get("after")
		s.await(r.Context(), after)
		report, ok := s.since(after)
		if !ok {
			http.Error(w, "kube-proxy has not programmed anything yet", http.StatusServiceUnavailable)
			return
		}
		text, err := json.Marshal(report)
		if err != nil {
			return // impossible with these fields
		}
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeLimit)) // then there is none
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		// An error means that the client closed the connection.
		_, _ = w.Write(text)
	})
}

func (s *Server) version(number int) string { return s.process + "-" + strconv.Itoa(number) }

// since returns the newest report if there is one, as a change of an earlier one if that is known still.
func (s *Server) since(after string) (r Report, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r = s.report
	r.Version = s.version(s.number)
	for back := 0; back < len(s.changes); back++ {
		if after != s.version(s.number-back) {
			continue
		}
		r.After, r.Services = after, map[string]*Service{}
		for _, names := range s.changes[len(s.changes)-back:] {
			for _, name := range names {
				r.Services[name] = s.report.Services[name]
			}
		}
		break
	}
	return r, s.number > 0
}

// await returns once the newest report has another version than after, too many wait, ctx is done, or it takes too long.
func (s *Server) await(ctx context.Context, after string) {
	s.mu.Lock()
	version, newer := s.version(s.number), s.newer
	s.mu.Unlock()
	if version != after {
		return
	}
	select {
	case s.waiting <- struct{}{}:
		defer func() { <-s.waiting }()
	default:
		return
	}
	timer := time.NewTimer(MaxWait)
	defer timer.Stop()
	select {
	case <-newer:
	case <-timer.C:
	case <-ctx.Done():
	}
}
