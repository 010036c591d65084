// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// errNoServer says that no process accepts connections.
var errNoServer = errors.New("cannot connect to kube-proxy")

// errNotReady is of a process that has not programmed anything yet.
type errNotReady struct{ error }

// errUnknownPath says that a process has no such endpoint.
var errUnknownPath = errors.New("it does not support this command: it is not Tandem, or an older version")

// defaultServers are where kube-proxy serves metrics unless told otherwise. The first two are for
// one that shares the node: the others are upstream's there.
var defaultServers = []string{"127.0.0.1:10349", "[::1]:10349", "127.0.0.1:10249", "[::1]:10249"}

// answerLimit is enough for the largest Service on a busy node.
const answerLimit = 30 * time.Second

func addServerFlag(fs *pflag.FlagSet, server *string) {
	fs.StringVar(server, "server", "", "address and port of kube-proxy's metrics server (default: "+strings.Join(defaultServers, ", then ")+")")
}

// askServer queries kube-proxy, at its default addresses if none is given.
func askServer[Answer any](ctx context.Context, a *app, server, path string, query url.Values) (*Answer, error) {
	servers := a.servers
	if server != "" {
		address, found := strings.CutPrefix(server, "http://")
		if !found && strings.Contains(server, "://") || strings.ContainsAny(strings.TrimSuffix(address, "/"), "/?#@") {
			return nil, usagef("--server %q: want an address and port, 127.0.0.1:10249", server)
		}
		servers = []string{strings.TrimSuffix(address, "/")}
	}
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	var failed []string
	for _, s := range servers {
		answer, err := ask[Answer](ctx, s, path, query)
		if dial, ok := errors.AsType[*net.OpError](err); !ok || dial.Op != "dial" {
			return answer, err
		}
		failed = append(failed, err.Error())
	}
	return nil, fmt.Errorf("%w (%s)", errNoServer, strings.Join(failed, "; "))
}

// direct has not the default transport, which may use an HTTP proxy.
var direct = http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

func ask[Answer any](ctx context.Context, server, path string, query url.Values) (*Answer, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+server+path+"?"+query.Encode(), nil)
	if err != nil {
		return nil, usagef("--server %q: want an address and port, 127.0.0.1:10249", server)
	}
	response, err := direct.Do(request)
	if err != nil {
		var request *url.Error // its text has the whole query
		if errors.As(err, &request) {
			err = request.Err
		}
		return nil, fmt.Errorf("query kube-proxy: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode == http.StatusNotFound {
		return nil, fmt.Errorf("kube-proxy at %s: %w", server, errUnknownPath)
	}
	if response.StatusCode != http.StatusOK {
		const longest = 1 << 10
		text, _ := io.ReadAll(io.LimitReader(response.Body, longest))
		err := fmt.Errorf("kube-proxy at %s: %s", server, strings.TrimSpace(string(text)))
		if response.StatusCode == http.StatusServiceUnavailable {
			err = errNotReady{err}
		}
		return nil, err
	}
	var answer Answer
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return nil, fmt.Errorf("kube-proxy at %s: read the answer: %w", server, err)
	}
	return &answer, nil
}
