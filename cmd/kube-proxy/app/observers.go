// SPDX-License-Identifier: Apache-2.0

package app

import (
	"time"

	"github.com/tandem-proxy/tandem/proxier"
)

// observers calls each of several.
type observers []proxier.Observer

func (o observers) Queued(at time.Time) {
	for _, each := range o {
		each.Queued(at)
	}
}

func (o observers) Synced(info proxier.SyncInfo) {
	for _, each := range o {
		each.Synced(info)
	}
}

// observers are told of syncs. Health checks of Services are the other kube-proxy's, where that
// stays: they have one port each.
func (p *proxy) observers(left *leftovers) observers {
	list := observers{p.metrics, p.health, &p.recorded, &p.memory, &p.explain, p.ready, p.reports, left}
	if !p.host.isShared() {
		list = append(list, p.services)
	}
	return list
}
