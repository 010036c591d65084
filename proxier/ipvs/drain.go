// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
)

// drainInterval is how often it is seen whether connections have ended.
const drainInterval = 10 * time.Second

// forever is a deadline that does not come.
const forever = time.Duration(math.MaxInt64)

// Drain removes the virtual servers that processes of this mode (ours and upstream's) left in the
// network namespace of the calling thread, when nothing needs them any more. Another mode must serve
// already. Those with connections or UDP flows get no new ones, and are removed, with their
// addresses of kube-ipvs0, when the last one has ended. Flows whose endpoint is removed in the
// meantime end when their conntrack entries expire, as IPVS does not decide about them any more.
// Drain returns when Cleanup ends no connection, or ctx is done.
func Drain(ctx context.Context, opts Options) error {
	opts.Drain = forever
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	r, err := openLeftovers(&opts)
	if err != nil {
		return err
	}
	defer r.close()
	s := newServers(&leftServers{r.servers, r}, &opts)
	s.keeps = true
	every := time.NewTicker(drainInterval)
	defer every.Stop()
	for {
		if drained, err := r.drain(s); drained || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-every.C:
		}
	}
}

// drain removes what no connection needs, and reports whether nothing is needed.
func (r *leftovers) drain(s *servers) (drained bool, err error) {
	if r.servers == nil {
		return true, nil
	}
	if err := s.read(); err != nil {
		return false, err
	}
	if err := s.removeUnused(); err != nil {
		return false, err
	}
	needed := s.draining()
	addrs, err := r.addrs()
	if err != nil {
		return false, err
	}
	var errs []error
	for _, a := range addrs {
		if !has(needed, a) {
			errs = append(errs, r.device.Delete(a))
		}
	}
	return len(needed) == 0, errors.Join(errs...)
}

// ClusterIPSets returns the names of the sets of ClusterIPs and their ports in the network namespace
// of the calling thread; empty for families without one.
func ClusterIPSets() (names [proxier.Families]string, err error) {
	for f := range proxier.Families {
		of := set{clusterIP, f}
		there, err := of.exists()
		if err != nil {
			return names, fmt.Errorf("find ipset %s: %w", of, err)
		}
		if there {
			names[f] = of.String()
		}
	}
	return names, nil
}

// leftServers are the virtual servers that this mode left.
type leftServers struct {
	*kernelServers
	*leftovers
}

// List implements virtualServers.
func (r *leftServers) List() (map[serverKey]server, error) { return r.leftovers.list() }
