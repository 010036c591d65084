// SPDX-License-Identifier: Apache-2.0

package proxier

import "context"

// Update is what a tier has to bring into the kernel.
type Update struct {
	// Full says that Changes hold every service port there is: what the tier
	// carries besides is to be removed, and what it should carry is to be
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
	// Sync converges. After an error the tier knows by itself what it still
	// owes and tries again with the next call, whatever that call brings. One
	// service port that fails holds up no other.
	Sync(ctx context.Context, update Update) error
	// Cleanup removes everything of ours from the kernel, and nothing else.
	Cleanup(ctx context.Context) error
	// Supports returns nil if the tier can carry the frontend of that
	// decision, else the reason.
	Supports(d *Decision, f *Frontend) error
}
