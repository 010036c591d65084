// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"math"
	"time"

	"k8s.io/utils/clock"
)

// drainInterval is how often it is seen whether connections have ended.
const drainInterval = 10 * time.Second

// forever is a deadline that does not come.
const forever = time.Duration(math.MaxInt64)

// Drain removes the kernel state, except rules, that processes of this mode (ours and upstream's)
// left in the network namespace of the calling thread. Another mode must serve already. Virtual
// servers with connections or UDP flows get no new ones, and are removed, with their addresses
// of kube-ipvs0, when the last one has ended. Flows whose endpoint is removed in the meantime end
// when their conntrack entries expire, as IPVS does not decide about them any more. Drain returns
// when nothing is left, or ctx is done.
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

// drain removes what no connection needs, and says whether that was everything.
func (r *leftovers) drain(s *servers) (drained bool, err error) {
	if r.servers == nil {
		return true, r.remove()
	}
	if err := s.read(); err != nil {
		return false, err
	}
	if err := s.removeUnused(); err != nil {
		return false, err
	}
	needed := s.draining()
	if len(needed) == 0 {
		return true, r.remove()
	}
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
	return false, errors.Join(errs...)
}

// leftServers are the virtual servers that this mode left.
type leftServers struct {
	*kernelServers
	*leftovers
}

// List implements virtualServers.
func (r *leftServers) List() (map[serverKey]server, error) { return r.leftovers.list() }
