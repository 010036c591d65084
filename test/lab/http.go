// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"time"
)

// getTimeout applies to contexts without a deadline.
const getTimeout = 5 * time.Second

// DialContext is Dial to an address as text, for libraries that need this signature.
func (s *Sandbox) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, err
	}
	return s.Dial(ctx, network, to)
}

// HTTPClient sends requests from inside the sandbox, each over a new connection. Hosts in URLs
// must be addresses, as names are not resolved. The timeout limits each request, and must
// not be 0.
func (s *Sandbox) HTTPClient(timeout time.Duration) *http.Client {
	// After a request is cancelled, a transport continues to dial with a context that has
	// no deadline.
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		ctx, cancel := withDeadline(ctx, timeout)
		defer cancel()
		return s.DialContext(ctx, network, address)
	}
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial}, Timeout: timeout}
}

// Get sends a request to a server at the sandbox's loopback address.
func (s *Sandbox) Get(ctx context.Context, port uint16, path string) (code int, body string, err error) {
	ctx, cancel := withDeadline(ctx, getTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d%s", port, path), nil)
	if err != nil {
		return 0, "", err
	}
	deadline, _ := ctx.Deadline()
	response, err := s.HTTPClient(time.Until(deadline)).Do(request)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, string(text), err
}

// Fetch is Get, but any other status than 200 OK is an error.
func (s *Sandbox) Fetch(ctx context.Context, port uint16, path string) (string, error) {
	code, body, err := s.Get(ctx, port, path)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("%s answers %d: %s", path, code, body)
	}
	return body, err
}

// Listen opens a TCP socket in the sandbox, as net.Listen does, for IPv4 addresses.
func (s *Sandbox) Listen(address string) (l net.Listener, err error) {
	err = s.Do(func() error {
		l, err = net.Listen("tcp4", address)
		return err
	})
	return l, wrap(err, "listen at %s in %s", address, s.Name)
}

// ServeHTTP starts a server at the sandbox's loopback address and returns its URL. The server
// ends with the sandbox at the latest.
func (s *Sandbox) ServeHTTP(h http.Handler) (server *http.Server, url string, err error) {
	l, err := s.Listen("127.0.0.1:0")
	if err != nil {
		return nil, "", err
	}
	server = &http.Server{Handler: h}
	go func() { _ = server.Serve(l) }() // until it is closed
	return server, "http://" + l.Addr().String(), s.keep(server)
}
