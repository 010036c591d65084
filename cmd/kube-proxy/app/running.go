// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"time"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/proxier/ebpf"
)

// askLimit is for a process that is busy with a large cluster.
const askLimit = 3 * time.Second

// knownAnswers are what kube-proxies answer, ours and upstream's.
var knownAnswers = []struct {
	server func(*config.Config) string
	path   string
	answer *regexp.Regexp
}{
	{func(c *config.Config) string { return c.KubeProxy.MetricsBindAddress }, "/proxyMode", regexp.MustCompile(`^[a-z]{4,16}$`)},
	{func(c *config.Config) string { return c.KubeProxy.HealthzBindAddress }, "/healthz", regexp.MustCompile(`^\{.*"lastUpdated"`)},
}

// runningProxy tells which kube-proxy serves this node, ours or another; empty for none. It
// finds one by the lock of mode ebpf, or by its servers if they have the addresses of this
// configuration.
func runningProxy(ctx context.Context, h *host) string {
	if root, err := h.cgroupRoot(); err == nil && root != "" {
		if busy, err := ebpf.Busy(root); err == nil && busy {
			return "a process in mode ebpf holds the lock of " + root
		}
	}
	for _, known := range knownAnswers {
		url, ok := loopbackURL(known.server(h.config), known.path)
		if !ok {
			continue
		}
		if body, err := fetch(ctx, url); err == nil && known.answer.MatchString(body) {
			const longest = 40
			return fmt.Sprintf("%s answers %.*q", url, longest, body)
		}
	}
	return ""
}

// loopbackURL leads to a server of this node.
func loopbackURL(address, path string) (string, bool) {
	hostName, port, err := net.SplitHostPort(address)
	if err != nil {
		return "", false // empty; others are validated before
	}
	if a, err := netip.ParseAddr(hostName); err == nil && a.IsUnspecified() {
		hostName = "127.0.0.1"
		if a.Is6() {
			hostName = "::1"
		}
	}
	return "http://" + net.JoinHostPort(hostName, port) + path, true
}

func fetch(ctx context.Context, url string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	// Not the default transport, which may use an HTTP proxy.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	const longest = 1 << 10
	body, err := io.ReadAll(io.LimitReader(response.Body, longest))
	return string(body), err
}
