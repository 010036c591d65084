// SPDX-License-Identifier: Apache-2.0

package differential

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
	"github.com/tandem-proxy/tandem/test/oracle"
)

// udpEntry is a UDP entry of conntrack. If it was not translated, replies come from its
// destination.
type udpEntry struct{ source, destination, replies netip.AddrPort }

// entries are a conntrack table.
type entries struct{ list, deleted []conntrack.Flow }

func (e *entries) Flows(_ context.Context, family proxier.Family) iter.Seq2[conntrack.Flow, error] {
	return func(yield func(conntrack.Flow, error) bool) {
		for _, f := range e.list {
			if proxier.FamilyOf(f.Destination.Addr()) == family && !yield(f, nil) {
				return
			}
		}
	}
}

func (e *entries) Delete(_ context.Context, list []conntrack.Flow) (int, error) {
	e.deleted = append(e.deleted, list...)
	return len(list), nil
}

// Conntrack is Tandem's side of the UDP entries.
type Conntrack struct {
	*staleudp.Reconciler
	table entries
}

// NewConntrack returns one that knows no frontends. It has to observe all updates.
func NewConntrack() *Conntrack {
	c := &Conntrack{}
	c.Reconciler = staleudp.New(staleudp.Options{Table: &c.table})
	return c
}

// stale returns which entries of a family are deleted.
func (c *Conntrack) stale(ctx context.Context, family proxier.Family, list []udpEntry) ([]bool, error) {
	c.table = entries{}
	for i, e := range list {
		c.table.list = append(c.table.list, conntrack.Flow{Protocol: proxier.UDP, ID: uint32(1 + i), Source: e.source, Destination: e.destination, Replies: e.replies})
	}
	_, err := c.Reconcile(ctx, family)
	gone := make([]bool, len(list))
	for _, f := range c.table.deleted {
		gone[f.ID-1] = true
	}
	return gone, err
}

// stale asks which entries upstream deletes.
func (n *Node) stale(c *oracle.Cluster, list []udpEntry) ([]bool, error) {
	process, err := n.acquire(c)
	if err != nil {
		return nil, err
	}
	defer n.upstream.release(process)
	if n.invalid {
		return nil, nil
	}
	var q question
	for _, e := range list {
		q.Flows = append(q.Flows, udpFlow{e.source.String(), e.destination.String(), e.replies.String()})
	}
	a, err := process.ask(q)
	if err == nil && len(a.Stale) != len(list) {
		err = fmt.Errorf("%d answers about %d entries", len(a.Stale), len(list))
	}
	return a.Stale, err
}

// CheckConntrack compares which entries of a cluster's frontends are deleted: those that lead to
// its endpoints, whatever their conditions are, to another address, and nowhere.
func (n *Node) CheckConntrack(c *oracle.Cluster, ours *Conntrack) error {
	for family := range proxier.Families {
		list := entriesOf(c, family)
		gone, err := ours.stale(context.Background(), family, list)
		if err != nil {
			return err
		}
		if len(list) == 0 {
			continue
		}
		theirs, err := n.stale(c, list)
		if err != nil {
			return err
		}
		for i := range theirs {
			d := udpDifference{c, list[i], gone[i]}
			switch {
			case gone[i] == theirs[i]:
				n.upstream.count(fmt.Sprintf("same: UDP entry deleted: %t", gone[i]))
			case !n.upstream.meantUDP(&d):
				return fmt.Errorf("UDP entry %s -> %s => %s: deleted by Tandem: %t, by upstream: %t",
					list[i].source, list[i].destination, list[i].replies, gone[i], theirs[i])
			}
		}
	}
	return nil
}

// entriesOf returns entries of all frontends that only one service port claims.
func entriesOf(c *oracle.Cluster, family proxier.Family) (list []udpEntry) {
	client := []netip.Addr{netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("2001:db8:51:100::1")}[family]
	stranger := []netip.AddrPort{netip.MustParseAddrPort("10.244.9.9:9"), netip.MustParseAddrPort("[fd00:10:244:9::9]:9")}[family]
	frontends := c.Frontends()
	claims := map[netip.AddrPort]int{}
	endpoints := map[proxier.ServicePortName][]netip.AddrPort{}
	for _, f := range frontends {
		if f.Owner.Protocol != proxier.UDP || proxier.FamilyOf(f.Addr.Addr()) != family {
			continue
		}
		claims[f.Addr]++
		if f.Kind == proxier.ClusterIP {
			a := c.Ask(proxier.Flow{Source: netip.AddrPortFrom(client, 40000), Destination: f.Addr, Protocol: proxier.UDP, Device: "eth0"})
			if a.Owner == f.Owner {
				endpoints[f.Owner] = slices.SortedFunc(maps.Keys(a.Endpoints), netip.AddrPort.Compare)
			}
		}
	}
	for _, f := range frontends {
		if f.Owner.Protocol != proxier.UDP || proxier.FamilyOf(f.Addr.Addr()) != family || claims[f.Addr] > 1 || undefinedCopies(c, f.Owner, family) {
			continue
		}
		at := []netip.AddrPort{f.Addr}
		if f.Kind == proxier.NodePort {
			at = nil
			for _, a := range c.Facts.LocalAddrs {
				if proxier.FamilyOf(a) == family && claims[netip.AddrPortFrom(a, f.Addr.Port())] == 0 {
					at = append(at, netip.AddrPortFrom(a, f.Addr.Port()))
				}
			}
		}
		for _, to := range at {
			for _, replies := range append(slices.Clone(endpoints[f.Owner]), stranger, to) {
				list = append(list, udpEntry{netip.AddrPortFrom(client, 40000), to, replies})
			}
		}
	}
	slices.SortFunc(list, func(a, b udpEntry) int {
		return cmp.Or(a.destination.Compare(b.destination), a.replies.Compare(b.replies))
	})
	return list
}
