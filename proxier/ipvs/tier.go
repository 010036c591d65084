// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"sync"

	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/iptables"
)

// Tier carries frontends in virtual servers, and those it cannot in rules.
type Tier struct {
	planner
	servers *servers
	addrs   *ledger[netip.Addr]
	members *ledger[member]
	rules   rules
	system  system

	mu    sync.Mutex
	ports map[uint32]*port // by Decision.Index
	// owed are service ports that are to be written, in the order in which they should
	// become visible; owes has the same.
	owed  []uint32
	owes  map[uint32]struct{}
	whole bool // everything was compared with the kernel, and written
	// Of the rules: they were told of everything once, they know the node's, and they try
	// again with their next sync.
	rulesTold, rulesKnown, rulesOwe bool
}

// rules is the tier that has the rules.
type rules interface {
	proxier.Tier
	Close() error
}

// system is what has to be there besides.
type system interface {
	// prepare makes the device, the sets and the settings of the kernel. It repairs, too.
	prepare(context.Context) error
	// links are the prefixes of the devices, but for those of kube-ipvs0 and of single
	// addresses.
	links() ([]netip.Prefix, error)
	// serving says whether rules of an earlier process serve.
	serving(context.Context) (bool, error)
	cleanup(context.Context) error
	close() error
}

// port is a service port: what is wanted, and what each part has.
type port struct {
	decision *proxier.Decision // nil when it is gone
	plan     *plan             // counted in
	// share is what rules are to have, and rules what they were told.
	share, rules *proxier.Decision
	// refused is why virtual servers have nothing of it, and told the decision about
	// which that was reported.
	refused error
	told    *proxier.Decision
}

var _ proxier.Tier = (*Tier)(nil)

// Open finds out what can be carried in the network namespace of the calling thread; it
// needs CAP_NET_ADMIN. It leaves nothing in the kernel.
func Open(ctx context.Context, opts Options) (*Tier, error) {
	unusable, err := probeServers(&opts)
	if err != nil {
		return nil, err
	}
	t := newTier(opts)
	t.unusable = unusable
	t.opts.Rules.Extra = t.opts.extra
	rules, err := iptables.Open(ctx, t.opts.Rules)
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

// use says what there is of a kernel.
func (t *Tier) use(s system, servers virtualServers, device objects[netip.Addr], sets objects[member]) {
	t.system = s
	t.servers, t.addrs, t.members = newServers(servers, t.opts), newLedger(device), newLedger(sets)
	t.reset()
}

// reset forgets everything.
func (t *Tier) reset() {
	t.servers, t.addrs, t.members = newServers(t.servers.kernel, t.opts), newLedger(t.addrs.kernel), newLedger(t.members.kernel)
	t.ports, t.owed, t.owes = map[uint32]*port{}, nil, map[uint32]struct{}{}
	t.whole, t.rulesTold, t.rulesKnown, t.rulesOwe = false, false, false, false
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

// Why returns nil if a virtual server carries a frontend, and else why rules do.
func (t *Tier) Why(d *proxier.Decision, f *proxier.Frontend) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.why(d, f)
}

func (t *Tier) why(d *proxier.Decision, f *proxier.Frontend) error {
	if p := t.ports[d.Index()]; p != nil && p.refused != nil && p.decision == d {
		return p.refused
	}
	return t.refuses(d, f)
}

// Close lets go of what this process has. What is in the kernel stays.
func (t *Tier) Close() error { return errors.Join(t.rules.Close(), t.system.close()) }
