// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"io"
	"maps"
	"net/http"
	"path"
	"strconv"
	"sync"
	"time"
)

// contact notes when the API server last sent something for each resource that is watched: an event, a
// bookmark, which comes each minute, or the start of a watch. Informers do not tell their handlers of bookmarks.
type contact struct {
	next http.RoundTripper

	mu   sync.Mutex
	last map[string]time.Time // by resource
}

// RoundTrip implements http.RoundTripper.
func (c *contact) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := c.next.RoundTrip(r)
	if err != nil || response.StatusCode != http.StatusOK {
		return response, err
	}
	if watch, _ := strconv.ParseBool(r.URL.Query().Get("watch")); watch {
		resource := path.Base(r.URL.Path)
		c.heard(resource)
		response.Body = &watchBody{response.Body, func() { c.heard(resource) }}
	}
	return response, nil
}

// WrappedRoundTripper lets client-go find the transport that has the connections.
func (c *contact) WrappedRoundTripper() http.RoundTripper { return c.next }

func (c *contact) heard(resource string) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last[resource] = now
}

// LastEvents is when the API server last sent an event or bookmark for each resource that is watched. A resource is
// missing before its first watch.
func (c *Client) LastEvents() map[string]time.Time {
	c.contact.mu.Lock()
	defer c.contact.mu.Unlock()
	return maps.Clone(c.contact.last)
}

// watchBody is the answer to a watch.
type watchBody struct {
	io.ReadCloser
	heard func()
}

func (b *watchBody) Read(to []byte) (int, error) {
	n, err := b.ReadCloser.Read(to)
	if n > 0 {
		b.heard()
	}
	return n, err
}
