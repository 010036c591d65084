// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/servicelb/nodereport"
)

const (
	// reportTimeout is how long a kube-proxy may take to answer, besides the time that it waits for a newer report.
	reportTimeout = 3 * time.Second
	// retryReport is the time until a kube-proxy is asked again that did not answer, and retryNone that until one is asked again
	// that does not report.
	retryReport, retryNone = time.Second, 10 * time.Second
	// maxReport is the size of the largest report that is read, in bytes.
	maxReport = 16 << 20
	// listenerHold is how long a port counts as taken after a process of the host stopped listening there: it may be restarting.
	listenerHold = 10 * time.Second
)

// errNoReport is for kube-proxies that do not report: those of others, and earlier versions.
var errNoReport = errors.New("the kube-proxy does not report")

// reports follows what the kube-proxies of nodes report.
type reports struct {
	port    uint16
	changed func()
	client  *http.Client

	mu    sync.Mutex
	nodes map[string]*follower
	group sync.WaitGroup
}

// follower follows the report of one node.
type follower struct {
	stop context.CancelFunc

	// The rest is guarded by reports.mu.
	addresses []netip.Addr
	known     bool               // it has answered
	report    *nodereport.Report // nil if it does not report
	held      map[nodereport.Listener]time.Time
	listening []nodereport.Listener // by the last answer
}

func newReports(port uint16, changed func()) *reports {
	return &reports{port: port, changed: changed, nodes: map[string]*follower{}, client: &http.Client{
		Timeout: nodereport.MaxWait + reportTimeout, Transport: &http.Transport{MaxIdleConnsPerHost: 1, IdleConnTimeout: time.Minute}, // nodes are not behind a proxy of the environment
	}}
}

// of implements servicelb.Objects. The report is immutable.
func (r *reports) of(node string) *nodereport.Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	if f := r.nodes[node]; f != nil {
		return f.report
	}
	return nil
}

// known reports whether a node has answered, be it that it does not report.
func (r *reports) known(node string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	f := r.nodes[node]
	return f != nil && f.known
}

// want follows these nodes, and no others any more. It is called by one goroutine.
func (r *reports) want(ctx context.Context, nodes []*v1.Node) {
	r.mu.Lock()
	defer r.mu.Unlock()
	there := make(map[string]bool, len(nodes))
	for _, n := range nodes {
		there[n.Name] = true
		f := r.nodes[n.Name]
		if f == nil {
			f = &follower{held: map[nodereport.Listener]time.Time{}}
			r.nodes[n.Name] = f
			var own context.Context
			own, f.stop = context.WithCancel(ctx)
			r.group.Go(func() { r.follow(own, n.Name, f) })
		}
		f.addresses = internalAddresses(n)
	}
	for name, f := range r.nodes {
		if !there[name] {
			f.stop()
			delete(r.nodes, name)
		}
	}
}

// forget drops what nodes said that are gone: when they come back, after a reboot, they may serve nothing yet.
func (r *reports) forget(gone func(node string) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, f := range r.nodes {
		if f.known && gone(name) {
			f.known, f.report = false, nil
		}
	}
}

// wait returns once nothing is followed any more, after ctx of want is done.
func (r *reports) wait() {
	r.group.Wait()
	r.client.CloseIdleConnections()
}

// begin returns when these nodes are known, or have had the time.
func (r *reports) begin(ctx context.Context, nodes []*v1.Node, fit func(string) bool) {
	ctx, cancel := context.WithTimeout(ctx, missesUntilGone*healthInterval)
	defer cancel()
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for slices.ContainsFunc(nodes, func(n *v1.Node) bool { return fit(n.Name) && !r.known(n.Name) }) {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// follow asks one kube-proxy again and again until ctx is done. What a node that does not answer said last counts until it is gone: whether
// it is, is the matter of its health.
func (r *reports) follow(ctx context.Context, node string, f *follower) {
	logger := klog.FromContext(ctx)
	version := ""
	for ctx.Err() == nil {
		asked := time.Now()
		report, err := r.ask(ctx, f, version)
		pause := time.Duration(0)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			if report.Version == version && time.Since(asked) < nodereport.MaxWait/2 {
				pause = retryReport // it does not wait: others do already, or it ends
			}
			if version = r.note(f, report); version == "" {
				pause = retryReport // a change of a report that is not known any more
			}
		case errors.Is(err, errNoReport):
			pause, version = retryNone, ""
			r.note(f, nil)
		default:
			pause = retryReport
			logger.V(2).Info("A kube-proxy does not report", "node", node, "err", err)
		}
		if pause > 0 {
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
		}
	}
}

// note takes over an answer; nil for a kube-proxy that does not report. It returns the version of the report.
func (r *reports) note(f *follower, answer *nodereport.Report) (version string) {
	r.mu.Lock()
	before, was := f.report, f.known
	var report *nodereport.Report
	if answer != nil {
		if report = before.Apply(answer); report == nil {
			r.mu.Unlock()
			return ""
		}
		version = report.Version
	}
	f.known, f.report = true, report
	changed := !was || (before == nil) != (report == nil)
	if report != nil {
		now := time.Now()
		for _, l := range f.listening {
			f.held[l] = now.Add(listenerHold)
		}
		f.listening = slices.Clone(report.Listeners)
		for l, until := range f.held {
			switch {
			case slices.Contains(f.listening, l):
				delete(f.held, l)
			case now.After(until):
				delete(f.held, l)
			default:
				report.Listeners = append(report.Listeners, l)
			}
		}
		slices.SortFunc(report.Listeners, nodereport.Listener.Compare)
		changed = changed || before.Version != report.Version || !slices.Equal(before.Listeners, report.Listeners)
	}
	r.mu.Unlock()
	if changed {
		r.changed()
	}
	return version
}

// ask asks at one address of the node after the other.
func (r *reports) ask(ctx context.Context, f *follower, version string) (report *nodereport.Report, err error) {
	r.mu.Lock()
	addresses := f.addresses
	r.mu.Unlock()
	err = errors.New("the node has no internal address")
	for _, a := range addresses {
		if report, err = r.get(ctx, a, version); err == nil || errors.Is(err, errNoReport) {
			return report, err
		}
	}
	return nil, err
}

func (r *reports) get(ctx context.Context, a netip.Addr, version string) (*nodereport.Report, error) {
	u := url.URL{Scheme: "http", Host: net.JoinHostPort(a.String(), strconv.Itoa(int(r.port))), Path: nodereport.Path, RawQuery: url.Values{"after": {version}}.Encode()}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	response, err := r.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound:
		return nil, errNoReport
	default:
		return nil, fmt.Errorf("%s answers %s", u.String(), response.Status)
	}
	text, err := io.ReadAll(io.LimitReader(response.Body, maxReport))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", u.String(), err)
	}
	report := &nodereport.Report{}
	if err := json.Unmarshal(text, report); err != nil || report.Version == "" { // some answer 200 to any path
		return nil, errNoReport
	}
	return report, nil
}

// internalAddresses are where a node's kube-proxy is asked.
func internalAddresses(n *v1.Node) (list []netip.Addr) {
	for _, a := range n.Status.Addresses {
		if ip, err := netip.ParseAddr(a.Address); err == nil && a.Type == v1.NodeInternalIP {
			list = append(list, ip)
		}
	}
	return list
}
