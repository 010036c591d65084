// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
)

const (
	// healthInterval is the time between two requests to a node's kube-proxy, and missesUntilGone how many of them fail in a row until the
	// node is withdrawn: within 6 s, with the time of the last request.
	healthInterval  = 1500 * time.Millisecond
	healthTimeout   = time.Second
	missesUntilGone = 3
)

// health asks the kube-proxy of every node whether it serves, at its health server, as load balancers of clouds do.
type health struct {
	port    uint16
	changed func()
	client  *http.Client

	mu    sync.Mutex
	nodes map[string]*nodeHealth
}

type nodeHealth struct {
	addresses []netip.Addr
	missed    int
	gone      bool
	asked     bool
}

func newHealth(port uint16, changed func()) *health {
	return &health{
		port: port, changed: changed, nodes: map[string]*nodeHealth{},
		client: &http.Client{Timeout: healthTimeout, Transport: &http.Transport{DisableKeepAlives: true}},
	}
}

// healthy implements servicelb.Objects. A node that was not asked yet is not.
func (h *health) healthy(name string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := h.nodes[name]
	return n != nil && n.asked && !n.gone
}

// isGone reports whether a node was withdrawn.
func (h *health) isGone(name string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := h.nodes[name]
	return n != nil && n.gone
}

// want says which nodes there are.
func (h *health) want(nodes []*v1.Node) {
	h.mu.Lock()
	defer h.mu.Unlock()
	names := map[string]bool{}
	for _, n := range nodes {
		names[n.Name] = true
		known := h.nodes[n.Name]
		if known == nil {
			known = &nodeHealth{}
			h.nodes[n.Name] = known
		}
		known.addresses = internalAddresses(n)
	}
	maps.DeleteFunc(h.nodes, func(name string, _ *nodeHealth) bool { return !names[name] })
}

// begin returns when every node has answered, or has been asked so often that it is withdrawn. A process that takes over from another
// one knows of no node, and would withdraw all of them.
func (h *health) begin(ctx context.Context) {
	ticker := time.NewTicker(healthInterval)
	defer ticker.Stop()
	for range missesUntilGone {
		h.round(ctx)
		if h.known() {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// known reports whether every node has answered.
func (h *health) known() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, n := range h.nodes {
		if !n.asked {
			return false
		}
	}
	return true
}

// run asks until ctx is done.
func (h *health) run(ctx context.Context) {
	ticker := time.NewTicker(healthInterval)
	defer ticker.Stop()
	for {
		h.round(ctx)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// round asks every node once. If none answers that answered before, and there are several, the fault is more likely on this side: nothing
// changes.
func (h *health) round(ctx context.Context) {
	h.mu.Lock()
	targets := map[string][]netip.Addr{}
	for name, n := range h.nodes {
		targets[name] = slices.Clone(n.addresses)
	}
	h.mu.Unlock()
	answers := h.askAll(ctx, targets)
	if ctx.Err() != nil {
		return
	}
	logger := klog.FromContext(ctx)
	h.mu.Lock()
	some, served := 0, 0
	for name, n := range h.nodes {
		if answers[name] {
			some++
		}
		if n.asked && !n.gone {
			served++
		}
	}
	changed := false
	if some == 0 && served > 1 {
		logger.Info("No node's kube-proxy answers; is the network of this controller at fault? All stay advertised", "nodes", served)
	} else {
		for name, n := range h.nodes {
			ok, asked := answers[name]
			switch {
			case !asked:
			case ok:
				if changed = changed || n.gone || !n.asked; n.gone {
					logger.Info("The kube-proxy of a node answers again", "node", name)
				}
				n.asked, n.gone, n.missed = true, false, 0
			default:
				if n.missed++; n.missed >= missesUntilGone && !n.gone {
					if n.asked {
						logger.Info("The kube-proxy of a node does not answer; its addresses are withdrawn", "node", name, "unanswered", n.missed)
					}
					changed = changed || n.asked
					n.gone = true
				}
			}
		}
	}
	h.mu.Unlock()
	if changed {
		h.changed()
	}
}

// askAll asks some nodes at once, and returns who says that it serves.
func (h *health) askAll(ctx context.Context, targets map[string][]netip.Addr) map[string]bool {
	const atOnce = 512 // those that are down take healthTimeout for each address
	var mu sync.Mutex
	var wg sync.WaitGroup
	answers, slots := map[string]bool{}, make(chan struct{}, atOnce)
	for name, addresses := range targets {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			ok := slices.ContainsFunc(addresses, func(a netip.Addr) bool { return h.ask(ctx, a) == nil })
			mu.Lock()
			answers[name] = ok
			mu.Unlock()
		})
	}
	wg.Wait()
	return answers
}

func (h *health) ask(ctx context.Context, a netip.Addr) error {
	url := "http://" + net.JoinHostPort(a.String(), strconv.Itoa(int(h.port))) + "/healthz"
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := h.client.Do(request)
	if err != nil {
		return err
	}
	_ = response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", url, response.Status)
	}
	return nil
}
