// SPDX-License-Identifier: Apache-2.0

package nodereport

import (
	"context"
	"encoding/json"
	"net/http"
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

// Server answers with the newest report. It is safe for concurrent use.
type Server struct {
	start   time.Time
	waiting chan struct{}

	mu      sync.Mutex
	number  uint64
	version string
	body    string // without its version, for comparison
	text    []byte
	newer   chan struct{} // closed once there is a newer report
	ended   bool
}

// NewServer makes a server without a report.
func NewServer() *Server {
	s := &Server{start: time.Now(), waiting: make(chan struct{}, maxWaiting), newer: make(chan struct{})}
	s.Set(Report{})
	return s
}

// Set has the server answer with a report from now on. It sets its version.
func (s *Server) Set(r Report) {
	r.Version = ""
	body, err := json.Marshal(r)
	if err != nil {
		return // impossible with these fields
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.number > 0 && s.body == string(body) {
		return
	}
	s.number++
	r.Version = strconv.FormatInt(s.start.UnixNano(), 36) + "-" + strconv.FormatUint(s.number, 10)
	if s.text, err = json.Marshal(r); err != nil {
		return
	}
	s.version, s.body = r.Version, string(body)
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
		text := s.await(r.Context(), r.URL.Query().Get("after"))
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeLimit)) // then there is none
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		// An error means that the client closed the connection.
		_, _ = w.Write(text)
	})
}

// await returns the newest report, which has another version than after unless too many wait, ctx is done, or it takes too long.
func (s *Server) await(ctx context.Context, after string) []byte {
	version, text, newer := s.current()
	if version != after {
		return text
	}
	select {
	case s.waiting <- struct{}{}:
		defer func() { <-s.waiting }()
	default:
		return text
	}
	timer := time.NewTimer(MaxWait)
	defer timer.Stop()
	select {
	case <-newer:
	case <-timer.C:
	case <-ctx.Done():
	}
	_, text, _ = s.current()
	return text
}

func (s *Server) current() (version string, text []byte, newer <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.version, s.text, s.newer
}
