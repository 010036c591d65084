// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/xfrm"
	"github.com/tandem-proxy/tandem/proxier"
)

// awaitIPsec waits for the first policy of IPsec on a node where programs serve clients outside: they
// redirect packets past the stack, and with it past IPsec. It returns an error then, as the next process
// leaves these clients to rules. It does not wait for the policies to go: those of a VPN come and go with its
// clients.
func (h *host) awaitIPsec(ctx context.Context) error {
	if h.hasIPsec || h.leftClients()[proxier.FromOutside] != nil {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var found error
	f := xfrm.NewFollower(func() error {
		acts, err := xfrm.Acts()
		if acts {
			klog.FromContext(ctx).Info("This node has policies of IPsec now; exiting, so that rules serve clients outside. Services are still served")
			found = errors.New("a policy of IPsec was added, and clients outside need to be served by rules")
			cancel()
		}
		return err
	})
	f.Follow(ctx)
	return found
}
