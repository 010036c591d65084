// SPDX-License-Identifier: Apache-2.0

package proxier

import "context"

// Update is what a tier must program into the kernel.
type Update struct {
	// Full says that Changes contain all service ports. The tier must remove everything
	// else, and compare its desired state with the actual kernel state.
	Full bool
	// NodeRules apply to all frontends of this node; nil if they are unchanged.
	NodeRules *NodeRules
	// Changes are in the order in which they should become visible.
	Changes []PortChange
}

// Tier writes decisions into a kernel. It decides nothing itself.
type Tier interface {
	// Sync converges. After an error, the tier keeps pending changes and retries them with
	// the next call. A service port that fails does not delay others.
	Sync(ctx context.Context, update Update) error
	// Cleanup removes all kernel state created by the tier, and nothing else.
	Cleanup(ctx context.Context) error
	// Supports returns nil if the tier can serve the frontend of that
	// decision, else the reason.
	Supports(d *Decision, f *Frontend) error
}
