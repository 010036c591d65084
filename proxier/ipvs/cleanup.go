// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Cleanup implements proxier.Tier. Connections through virtual servers end.
func (t *Tier) Cleanup(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reset()
	// Rules first, as sets that they ask cannot go.
	return errors.Join(t.rules.Cleanup(ctx), t.system.cleanup(ctx))
}

// Cleanup removes what this mode leaves in the network namespace of the calling thread,
// created by this proxy or by upstream's: virtual servers, kube-ipvs0 and sets. The rules
// have to be gone: a set that a rule uses cannot be deleted. Virtual servers that are
// neither at an address of kube-ipvs0 nor at a NodePort stay, as do excluded ones.
func Cleanup(_ context.Context, opts Options) error {
	r, err := openLeftovers(&opts)
	if err != nil {
		return err
	}
	defer r.close()
	return r.remove()
}

// Present reports whether there is anything of this mode in the network namespace of the
// calling thread. It asks for kube-ipvs0, without which nothing is served.
func Present() (bool, error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return false, fmt.Errorf("open netlink: %w", err)
	}
	defer nl.Close()
	_, err = nl.LinkByName(Device)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return false, nil
	}
	return err == nil, err
}

func (s *kernelSystem) cleanup(context.Context) error {
	return s.netns.Do(func() error {
		r, err := openLeftovers(s.opts)
		if err != nil {
			return err
		}
		defer r.close()
		return r.remove()
	})
}
