// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"sync"

	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/delta"
	"github.com/tandem-proxy/tandem/proxier/ipvs/vserver"
)

// Tier serves frontends by virtual servers, and by rules those that virtual servers refuse.
type Tier struct {
	planner
	servers *servers
	addrs   *counted[netip.Addr]
	members *counted[member]
	rules   Rules
	system  system

	mu    sync.Mutex
	ports *ports // by Decision.Index
	whole bool   // everything was compared with the kernel, and written
	// Of the rules: they were given everything once, they know the node's, and they try
	// again with their next sync.
	rulesTold, rulesKnown, rulesFailed bool
}

// ports are the service ports. One is applied when the kernel has its plan.
type ports = delta.Delta[uint32, *proxier.Decision, *port]

// system is the kernel state that does not depend on Services.
type system interface {
	// prepare makes the device, the sets and the settings of the kernel. It repairs, too.
	prepare(context.Context) error
	// links are the prefixes of the devices, but for those of kube-ipvs0 and of single
	// addresses.
	links() ([]netip.Prefix, error)
	// serving reports whether rules of an earlier process serve.
	serving(context.Context) (bool, error)
	cleanup(context.Context) error
	close() error
}

// port is what each part of the tier has of a service port.
type port struct {
	plan *plan // counted in
	// share is what rules must serve, and rules what was last passed to them.
	share, rules *proxier.Decision
	// reported is the decision about which a refusal was reported.
	reported *proxier.Decision
}

var _ proxier.Tier = (*Tier)(nil)

// Open finds out what can be served in the network namespace of the calling thread; it
// needs CAP_NET_ADMIN. It leaves nothing in the kernel.
func Open(ctx context.Context, opts Options) (*Tier, error) {
	unusable, err := probeServers(&opts)
	if err != nil {
		return nil, err
	}
	t := newTier(opts)
	t.unusable = unusable
	rules, err := t.opts.OpenRules(ctx, t.opts.constantRules)
	if err != nil {
		return nil, err
	}
	t.rules = rules
	system, err := openSystem(t.opts)
	if err != nil {
		return nil, errors.Join(err, rules.Close())
	}
	for f := range proxier.Families {
		if rules.Usable(f) == nil {
			system.sets.families = append(system.sets.families, f)
		} else {
			t.unusable[f] = rules.Usable(f)
		}
	}
	t.use(system, system.servers, system.device, system.sets)
	return t, nil
}

func newTier(opts Options) *Tier {
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	return &Tier{planner: planner{opts: &opts}}
}

// use sets the kernel adapters.
func (t *Tier) use(s system, servers vserver.Kernel, device objects[netip.Addr], sets objects[member]) {
	t.system = s
	t.servers, t.addrs, t.members = newServers(servers, t.opts), newCounted(device), newCounted(sets)
	t.reset()
}

// reset forgets everything.
func (t *Tier) reset() {
	t.servers, t.addrs, t.members = newServers(t.servers.kernel, t.opts), newCounted(t.addrs.kernel), newCounted(t.members.kernel)
	t.ports = delta.New[uint32, *proxier.Decision, *port](cmp.Compare[uint32])
	t.whole, t.rulesTold, t.rulesKnown, t.rulesFailed = false, false, false, false
}

// Supports implements proxier.Tier.
func (t *Tier) Supports(d *proxier.Decision, f *proxier.Frontend) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.why(d, f) == nil {
		return nil
	}
	return t.rules.Supports(d, f)
}

// Why returns nil if a virtual server serves a frontend, and else why rules do.
func (t *Tier) Why(d *proxier.Decision, f *proxier.Frontend) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.why(d, f)
}

func (t *Tier) why(d *proxier.Decision, f *proxier.Frontend) error {
	if p := t.ports.Get(d.Index()); p != nil && p.Desired() == d {
		if err := t.ports.Err(d.Index()); err != nil {
			return err
		}
	}
	return t.refuses(d, f)
}

// Run repairs rules that others delete or change, until ctx is done. What others do to virtual
// servers is repaired by the next full sync.
func (t *Tier) Run(ctx context.Context) { t.rules.Run(ctx) }

// Close closes handles. Kernel state stays.
func (t *Tier) Close() error { return errors.Join(t.rules.Close(), t.system.close()) }
