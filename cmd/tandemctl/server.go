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
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/sources/otherproxy"
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
	fs.StringVar(server, "server", "", "address and port of kube-proxy's metrics server (default: "+strings.Join(defaultServers, ", then ")+", then where a process kube-proxy listens)")
}

// findServers are where processes of kube-proxy serve metrics, as with metricsBindAddress, in this network namespace. In a
// pod without hostPID, they are those of its container.
func findServers(ctx context.Context) (list []string) {
	found, err := otherproxy.MetricsServers(ctx, "kube-proxy")
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot look for kube-proxy's metrics server", "err", err)
	}
	for _, at := range found {
		list = append(list, at.String())
	}
	return list
}

// askServer queries kube-proxy. If none is given, that is at its default addresses, or else where it is found.
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
	answer, err := askFirst[Answer](ctx, servers, path, query)
	if server == "" && isElsewhere(err) {
		if found, err := askFirst[Answer](ctx, a.findServers(ctx), path, query); !isElsewhere(err) {
			return found, err
		}
	}
	return answer, err
}

// isElsewhere reports whether another server may have the answer.
func isElsewhere(err error) bool {
	return errors.Is(err, errNoServer) || errors.Is(err, errUnknownPath)
}

// askFirst is the answer of the first server that knows the path: one of them may be another kube-proxy's.
func askFirst[Answer any](ctx context.Context, servers []string, path string, query url.Values) (*Answer, error) {
	var failed []string
	var unknown error
	for _, s := range servers {
		answer, err := ask[Answer](ctx, s, path, query)
		dial, ok := errors.AsType[*net.OpError](err)
		switch {
		case ok && dial.Op == "dial":
			failed = append(failed, err.Error())
		case errors.Is(err, errUnknownPath):
			unknown = err
		default:
			return answer, err
		}
	}
	if unknown != nil {
		return nil, unknown
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
		line, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
		err := fmt.Errorf("kube-proxy at %s: %s", server, line)
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
