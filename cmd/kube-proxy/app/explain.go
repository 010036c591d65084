// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/explain"
	"github.com/tandem-proxy/tandem/proxier"
)

const (
	// maxQuery is far more than a flow needs.
	maxQuery = 512
	// answerLimit is how long a client may take to read the answer: others wait
	// for it.
	answerLimit = 10 * time.Second
)

// explainer answers tandemctl explain. It implements proxier.Observer to know
// when there is something to explain.
type explainer struct {
	node  string
	table atomic.Pointer[proxier.Table]
	tiers explain.Tiers
	// one answer at a time: that about a large Service takes memory.
	one sync.Mutex

	next *proxier.Table // served once it is filled
}

// Queued implements proxier.Observer.
func (x *explainer) Queued(time.Time) {}

// Synced implements proxier.Observer.
func (x *explainer) Synced(proxier.SyncInfo) { x.table.Store(x.next) }

func (x *explainer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if peer, err := netip.ParseAddrPort(r.RemoteAddr); err != nil || !peer.Addr().Unmap().IsLoopback() {
		http.Error(w, "this is answered on the node itself, to loopback addresses", http.StatusForbidden)
		return
	}
	flow, err := flowOf(r.URL)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	table := x.table.Load()
	if table == nil {
		http.Error(w, "kube-proxy has not programmed anything yet: it waits for its source of Services, or for another process to end", http.StatusServiceUnavailable)
		return
	}
	x.one.Lock()
	defer x.one.Unlock()
	// Not every kind of connection has one; those of a server do.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerLimit))
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_ = json.NewEncoder(w).Encode(explain.Of(x.node, table, flow, x.tiers)) // the client is gone if this fails
}

func flowOf(u *url.URL) (flow proxier.Flow, err error) {
	if len(u.RawQuery) > maxQuery {
		return flow, fmt.Errorf("a query of %d bytes; %d are enough", len(u.RawQuery), maxQuery)
	}
	q := u.Query()
	return explain.ParseFlow(q.Get(explain.ParamSource), q.Get(explain.ParamDestination), q.Get(explain.ParamProtocol), q.Get(explain.ParamDevice))
}

// explainTiers says whether the tier carries the frontend of an explanation.
func (p *proxy) explainTiers(e *proxier.Explanation) []explain.Tier {
	p.tierMu.Lock()
	defer p.tierMu.Unlock()
	fast := p.tiers.fast
	if fast == nil {
		if p.tiers.rules == nil {
			return nil
		}
		t := explain.Tier{Name: string(capabilities.ModeIPTables), Carries: true}
		if err := p.tiers.rules.Supports(e.Decision, e.Frontend); err != nil {
			t.Carries, t.Detail = false, err.Error()
		}
		return []explain.Tier{t}
	}
	t := explain.Tier{Name: string(p.decision.Mode), Carries: true}
	var why error
	if p.tiers.placed != nil {
		why = p.tiers.placed.Why(e.Decision, e.Frontend)
	} else {
		why = fast.Supports(e.Decision, e.Frontend)
	}
	switch {
	case why != nil:
		t.Carries, t.Detail = false, why.Error()
	case e.Origin == proxier.FromOutside && len(missingForPackets(&p.report)) > 0:
		t.Carries, t.Detail = false, "this kernel cannot have programs translate packets"
	case e.Origin == proxier.FromPod && p.opts.Config.Tandem.EBPF.SocketLB == config.SocketLBHost:
		t.Carries, t.Detail = false, "sockets of pods are left alone (ebpf.socketLB: host)"
	case len(fast.Unplaced()) > 0:
		t.Detail = fmt.Sprintf("if it fits: %d service ports do not, which 'tandemctl services' names", len(fast.Unplaced()))
	case e.Origin == proxier.FromOutside:
		t.Detail = "by packets: an endpoint on this node sees the client, one elsewhere sees this node"
	case e.Origin == proxier.FromPod && e.Route.Source == proxier.Masquerade:
		t.Detail = "at the socket of a pod of this node, where nothing is masqueraded: endpoints see the client"
	}
	if !t.Carries && p.tiers.rules != nil && p.tiers.rules.Supports(e.Decision, e.Frontend) == nil {
		return []explain.Tier{t, {Name: string(capabilities.ModeIPTables), Carries: true}}
	}
	return []explain.Tier{t}
}
