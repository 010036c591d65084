// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/proxier"
)

const (
	// maxQuery is far more than a flow needs.
	maxQuery = 512
	// answerLimit is how long a client may take to read the answer: others wait
	// for it.
	answerLimit = 10 * time.Second
)

const onlyLocal = "only answered on the node itself: connect from it, without a proxy, to a loopback address or to one of the node"

const notReady = "kube-proxy has not programmed anything yet: it is waiting for its source of Services, or for another process to end"

// explainer answers tandemctl explain and services. It implements proxier.Observer to
// know when there is something to explain.
type explainer struct {
	node, mode string
	// stateDirectory is where tandemctl keeps the states of backends.
	stateDirectory string
	table          atomic.Pointer[proxier.Table]
	tiers          explain.Tiers         // whether datapaths serve a frontend
	placement      explain.PlacementFunc // which datapath does
	// one answer at a time: that about a large Service takes memory.
	one sync.Mutex

	disruptions explain.Disruptions

	next *proxier.Table // served once it is filled
	// overrides are those of the last sync that succeeded.
	overrides atomic.Pointer[[]proxier.BackendOverride]
}

// Queued implements proxier.Observer.
func (x *explainer) Queued(time.Time) {}

// Synced implements proxier.Observer.
func (x *explainer) Synced(info proxier.SyncInfo) {
	if info.Err == nil {
		facts := x.next.Facts()
		x.overrides.Store(&facts.Overrides)
	}
	x.table.Store(x.next)
}

// flow answers how a connection is served.
func (x *explainer) flow(w http.ResponseWriter, r *http.Request) {
	flow, err := flowOf(r.URL)
	if err != nil && isLocal(r) {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	x.answer(w, r, func(table *proxier.Table) any {
		e := explain.Of(x.node, table, flow, x.tiers)
		e.Notes = append(e.Notes, x.disruptions.Notes(e.Frontend, e.Flow.Protocol, time.Now())...)
		return e
	})
}

// placements answers which datapath serves what is not in the maps.
func (x *explainer) placements(w http.ResponseWriter, r *http.Request) {
	x.answer(w, r, func(table *proxier.Table) any { return explain.PlacementsOf(x.node, x.mode, table, x.placement) })
}

// backends answers what operators say of backends, and which service ports have one.
func (x *explainer) backends(w http.ResponseWriter, r *http.Request) {
	b, err := backendOf(r.URL)
	if err != nil && isLocal(r) {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	inForce := x.overrides.Load()
	if inForce == nil && isLocal(r) {
		http.Error(w, notReady, http.StatusServiceUnavailable)
		return
	}
	x.answer(w, r, func(table *proxier.Table) any {
		return explain.BackendsOf(x.node, x.stateDirectory, table, *inForce, b)
	})
}

func backendOf(u *url.URL) (b explain.Backend, err error) {
	if len(u.RawQuery) > maxQuery {
		return b, fmt.Errorf("the query has %d bytes; the limit is %d", len(u.RawQuery), maxQuery)
	}
	q := u.Query()
	if !q.Has(explain.ParamBackend) {
		return b, nil
	}
	return explain.ParseBackend(q.Get(explain.ParamBackend), q.Get(explain.ParamService))
}

// isLocal reports whether a request comes from this host: from a loopback address, or from the address that it was sent
// to. A socket that connects to an address of its own host has that as its source. Another host cannot pretend that over TCP:
// the answer to its SYN never leaves this host, whose own stack resets it, so there is no connection to send a request by.
// A proxy on this host may forward what others ask, as the API server of a control-plane node does for pods/proxy and
// nodes/proxy: forwarded requests are not local.
func isLocal(r *http.Request) bool {
	if isForwarded(r.Header) {
		return false
	}
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return false
	}
	if peer.Addr().Unmap().IsLoopback() {
		return true
	}
	at, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	return ok && at.AddrPort().Addr().Unmap() == peer.Addr().Unmap()
}

// isForwarded reports whether a proxy says that it forwards a request. The API server's adds X-Forwarded-For, also to
// requests that upgrade.
func isForwarded(header http.Header) bool {
	for name := range header {
		if name == "Forwarded" || name == "Via" || strings.HasPrefix(name, "X-Forwarded-") {
			return true
		}
	}
	return false
}

func (x *explainer) answer(w http.ResponseWriter, r *http.Request, of func(*proxier.Table) any) {
	if !isLocal(r) {
		http.Error(w, onlyLocal, http.StatusForbidden)
		return
	}
	table := x.table.Load()
	if table == nil {
		http.Error(w, notReady, http.StatusServiceUnavailable)
		return
	}
	x.one.Lock()
	defer x.one.Unlock()
	result := of(table)
	// Not every kind of connection has one; those of a server do.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerLimit))
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_ = json.NewEncoder(w).Encode(result) // the client is gone if this fails
}

func flowOf(u *url.URL) (flow proxier.Flow, err error) {
	if len(u.RawQuery) > maxQuery {
		return flow, fmt.Errorf("the query has %d bytes; the limit is %d", len(u.RawQuery), maxQuery)
	}
	q := u.Query()
	return explain.ParseFlow(q.Get(explain.ParamSource), q.Get(explain.ParamDestination), q.Get(explain.ParamProtocol), q.Get(explain.ParamDevice))
}

// explainTiers reports whether the datapaths serve the frontend of an explanation.
func explainTiers(m mode, open activeMode, e *proxier.Explanation) []explain.Tier {
	s := open.serves(e.Decision, e.Frontend, e.Origin)
	if s.refused == nil {
		return []explain.Tier{{Name: string(m.name()), Carries: true, Detail: open.detail(e)}}
	}
	list := []explain.Tier{{Name: string(m.name()), Detail: s.refused.Error()}}
	switch s.by {
	case "":
	case foreign:
		list = append(list, explain.Tier{Name: string(foreign), Carries: true, Detail: "another kube-proxy on this node"})
	default:
		list = append(list, explain.Tier{Name: string(s.by), Carries: true})
	}
	return list
}
