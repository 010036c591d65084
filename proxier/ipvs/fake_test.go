// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"net/netip"

	"github.com/tandem-proxy/tandem/proxier/ipvs/ipvstest"
)

// The simulated kernel of package ipvstest, with the set members of this package.
type (
	fakeKernel  = ipvstest.Kernel[member]
	fakeServers = ipvstest.Servers[member]
	fakeRules   = ipvstest.Rules[member]
)

func newFakeKernel() *fakeKernel            { return ipvstest.NewKernel[member]() }
func newFakeRules(k *fakeKernel) *fakeRules { return ipvstest.NewRules(k) }
func serversOf(k *fakeKernel) fakeServers   { return fakeServers{Kernel: k} }
func addrsOf(k *fakeKernel) objects[netip.Addr] {
	return ipvstest.Objects[netip.Addr, member]{Kernel: k, There: k.Addrs}
}
func membersOf(k *fakeKernel) objects[member] {
	return ipvstest.Objects[member, member]{Kernel: k, There: k.Members}
}

// fakeSystem is that of a kernel that has everything.
type fakeSystem struct{ rules *fakeRules }

func (fakeSystem) prepare(context.Context) error { return nil }
func (fakeSystem) links() ([]netip.Prefix, error) {
	return []netip.Prefix{netip.MustParsePrefix("172.18.0.0/16"), netip.MustParsePrefix("fd00:18::/64")}, nil
}
func (s fakeSystem) serving(context.Context) (bool, error) { return len(s.rules.There) > 0, nil }
func (fakeSystem) cleanup(context.Context) error           { return nil }
func (fakeSystem) close() error                            { return nil }

// process is a tier that begins on a kernel.
func process(k *fakeKernel, opts Options, rules *fakeRules) *Tier {
	t := newTier(opts)
	t.rules = rules
	t.servers, t.addrs, t.members = newServers(serversOf(k), t.opts), newCounted[netip.Addr](nil), newCounted[member](nil)
	t.use(fakeSystem{rules}, serversOf(k), addrsOf(k), membersOf(k))
	return t
}
