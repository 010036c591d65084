// SPDX-License-Identifier: Apache-2.0

package proxier

import "context"

// Update is what a tier has to bring into the kernel.
type Update struct {
	// Full says that Changes hold every service port there is: what the tier
	// serves besides is to be removed, and what it should serve is to be
	// compared with what the kernel really holds.
	Full bool
	// NodeRules are what all frontends of this node have in common; nil if they
	// are as they were.
	NodeRules *NodeRules
	// Changes are in the order in which they should become visible.
	Changes []PortChange
}

// Tier writes decisions into a kernel. It decides nothing itself.
type Tier interface {
	// Sync converges. After an error the tier keeps what is pending and retries
	// it with the next call, whatever that call brings. One service port that
	// fails does not delay the others.
	Sync(ctx context.Context, update Update) error
	// Cleanup removes all kernel state created by the tier, and nothing else.
	Cleanup(ctx context.Context) error
	// Supports returns nil if the tier can serve the frontend of that
	// decision, else the reason.
	Supports(d *Decision, f *Frontend) error
}
