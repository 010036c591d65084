// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/tandem-proxy/tandem/observe/status"
	"github.com/tandem-proxy/tandem/proxier"
)

// answerStatus answers tandemctl status. It has an answer from the start.
func (p *proxy) answerStatus(w http.ResponseWriter, r *http.Request) {
	if !isLocal(r) {
		http.Error(w, onlyLocal, http.StatusForbidden)
		return
	}
	// The probe is not cancelled with the request: its result is reused for others.
	s := p.status(context.WithoutCancel(r.Context()))
	// Not every kind of connection has one; those of a server do.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerLimit))
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_ = json.NewEncoder(w).Encode(s) // the client is gone if this fails
}

func (p *proxy) status(ctx context.Context) *status.Status {
	s := &status.Status{
		Node: p.opts.nodeName, Version: buildVersion(), Started: p.started,
		Mode: string(p.mode.name()), Configured: string(p.opts.Config.KubeProxy.Mode), ConfiguredBy: cmp.Or(p.opts.Config.Origin("mode"), "default"),
		Reasons: texts(p.decision.Reasons), Degraded: texts(p.decision.Degraded),
		Source: p.opts.Config.Tandem.Manifests, Ready: true, Checks: p.ready.Checks(ctx), ServicePorts: []status.Share{},
		LastEvents: map[string]time.Time{},
	}
	if p.client != nil {
		s.Source, s.LastEvents = p.client.URL(), p.client.LastEvents()
	}
	for _, c := range s.Checks {
		s.Ready = s.Ready && c.OK
	}
	p.recorded.Fill(s)
	p.withActive(func(open activeMode) { open.describe(s) })
	if table := p.explain.table.Load(); table != nil {
		p.explain.one.Lock() // one answer at a time
		defer p.explain.one.Unlock()
		p.withActive(func(open activeMode) {
			s.ServicePorts = status.Shares(table.All(), open.isUnplaced, func(d *proxier.Decision, f *proxier.Frontend, o proxier.Origin) string {
				return string(open.serves(d, f, o).by)
			})
		})
	}
	return s
}
