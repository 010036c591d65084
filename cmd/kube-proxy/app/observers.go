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
