// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"context"
	"errors"

	"github.com/tandem-proxy/tandem/proxier"
)

// foreign stands for another proxy on this node in the list of candidates: it serves everything,
// without being told.
type foreign struct{}

func (foreign) Sync(context.Context, proxier.Update) error          { return nil }
func (foreign) Cleanup(context.Context) error                       { return nil }
func (foreign) Supports(*proxier.Decision, *proxier.Frontend) error { return nil }

// ErrForeign is why the fast tier has none of the frontends of a kind.
var ErrForeign = errors.New("left to the other kube-proxy: the kind is not among coexistence.frontends")

// NewShared is for a node where another proxy serves what the fast tier does not: kinds of
// frontends that are no part of the share, and what the fast tier refuses or has no room for.
func NewShared(fast Fast, share proxier.Share) *Tier {
	t := New(fast, foreign{}, false)
	t.share = &share
	return t
}

// isForeign reports whether the other proxy serves frontends of a kind in any case.
func (t *Tier) isForeign(k proxier.Kind) bool { return t.share != nil && !t.share.Has(k) }

// fallbackName names the fallback in logs.
func (t *Tier) fallbackName() string {
	if t.share != nil {
		return "the other kube-proxy"
	}
	return "the fallback"
}
