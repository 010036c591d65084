// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"cmp"
	"net/netip"
	"slices"
)

// frontendKey is what two service ports cannot both have. Of a NodePort, the
// address is the unspecified one of its family.
type frontendKey struct {
	addr     [16]byte
	port     uint16
	protocol Protocol
}

func keyOf(addr netip.AddrPort, protocol Protocol) frontendKey {
	return frontendKey{addr: addr.Addr().As16(), port: addr.Port(), protocol: protocol}
}

func (k *frontendKey) addrPort() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(k.addr).Unmap(), k.port)
}

func (d *Decision) key(i int) frontendKey { return keyOf(d.Frontends[i].Addr, d.Name.Protocol) }

// compare is the order of Decision.Frontends.
func (f *Frontend) compare(family Family, kind Kind, addr netip.AddrPort) int {
	return cmp.Or(cmp.Compare(FamilyOf(f.Addr.Addr()), family), cmp.Compare(f.Kind, kind), f.Addr.Compare(addr))
}

// find returns the place of the frontend with that address, or -1.
func (d *Decision) find(addr netip.AddrPort) int {
	if len(d.Frontends) <= 8 {
		return slices.IndexFunc(d.Frontends, func(f Frontend) bool { return f.Addr == addr })
	}
	family := FamilyOf(addr.Addr())
	for kind := ClusterIP; kind < kinds; kind++ {
		if i, ok := slices.BinarySearchFunc(d.Frontends, addr, func(f Frontend, addr netip.AddrPort) int {
			return f.compare(family, kind, addr)
		}); ok {
			return i
		}
	}
	return -1
}

// claimsAs reports whether d claims the same addresses as before, with the same precedence.
func (d *Decision) claimsAs(was *Decision) bool {
	if len(d.Frontends) != len(was.Frontends) || d.Created != was.Created {
		return false
	}
	for i := range d.Frontends {
		if f, o := &d.Frontends[i], &was.Frontends[i]; f.Addr != o.Addr || f.Kind != o.Kind || f.Derived != o.Derived {
			return false
		}
	}
	return true
}

// claim takes the decision's addresses that have no owner.
func (t *Table) claim(d *Decision, disputes []frontendKey) []frontendKey {
	for i := range d.Frontends {
		key := d.key(i)
		holder, held := t.owner[key]
		if !held {
			t.owner[key] = d.index
			continue
		}
		claimants := t.contested[key]
		if holder == d.index && claimants == nil || slices.Contains(claimants, d.index) {
			if claimants != nil {
				disputes = append(disputes, key) // its claim may be another now
			}
			continue
		}
		if claimants == nil {
			claimants = []uint32{holder}
		}
		t.contested[key] = append(claimants, d.index)
		disputes = append(disputes, key)
	}
	return disputes
}

// release gives up the addresses of old that its successor does not claim.
func (t *Table) release(old, successor *Decision, disputes []frontendKey) []frontendKey {
	for i := range old.Frontends {
		if successor != nil && successor.find(old.Frontends[i].Addr) >= 0 {
			continue
		}
		key := old.key(i)
		claimants := t.contested[key]
		if claimants == nil { // no other claimant, so it is old's
			delete(t.owner, key)
			continue
		}
		j := slices.Index(claimants, old.index)
		if j < 0 {
			continue
		}
		t.contested[key] = slices.Delete(claimants, j, j+1)
		disputes = append(disputes, key)
	}
	return disputes
}

// resolve chooses the winner of each disputed address: the oldest of the claims of the
// first kind, since the API server would have rejected the later ones.
func (t *Table) resolve(disputes []frontendKey, out []PortChange) []PortChange {
	at := make(map[uint32]int, len(out)) // index -> its place in out
	for i, c := range out {
		if c.New != nil {
			at[c.New.index] = i
		}
	}
	copied := map[uint32]bool{} // decisions that were not handed over yet
	resolved := make(map[frontendKey]bool, len(disputes))
	for _, key := range disputes {
		if resolved[key] {
			continue
		}
		resolved[key] = true
		claimants := t.contested[key]
		if len(claimants) == 0 {
			delete(t.contested, key)
			delete(t.owner, key)
			continue
		}
		addr := key.addrPort()
		holder := t.rows[claimants[0]].decision
		for _, index := range claimants[1:] {
			if d := t.rows[index].decision; d.precedes(holder, addr) {
				holder = d
			}
		}
		t.owner[key] = holder.index
		if len(claimants) == 1 {
			delete(t.contested, key)
		}
		for _, index := range claimants {
			d := t.rows[index].decision
			f := &d.Frontends[d.find(addr)]
			var conflict *ServicePortName
			if index != holder.index {
				conflict = &holder.Name
			}
			if f.Conflict == conflict || f.Conflict != nil && conflict != nil && *f.Conflict == *conflict {
				continue
			}
			if !copied[index] {
				copied[index] = true
				mine := *d
				mine.Frontends = slices.Clone(d.Frontends)
				t.rows[index].decision = &mine
				f = &mine.Frontends[mine.find(addr)]
				if i, ok := at[index]; ok {
					out[i].New = &mine
				} else {
					at[index] = len(out)
					out = append(out, PortChange{Old: d, New: &mine})
				}
			}
			f.Conflict = conflict
		}
	}
	return out
}

// precedes reports whether d has the better claim to an address than o.
func (d *Decision) precedes(o *Decision, addr netip.AddrPort) bool {
	mine, other := &d.Frontends[d.find(addr)], &o.Frontends[o.find(addr)]
	if c := cmp.Compare(mine.Kind, other.Kind); c != 0 {
		return c < 0
	}
	if mine.Derived != other.Derived {
		return other.Derived
	}
	if d.Created != o.Created {
		return d.Created < o.Created
	}
	return cmp.Or(d.Name.compare(o.Name), cmp.Compare(d.index, o.index)) < 0
}

// inheritConflicts keeps the outcome of disputes that this change does not touch.
func (d *Decision) inheritConflicts(was *Decision) {
	for i := range was.Frontends {
		if was.Frontends[i].Conflict == nil {
			continue
		}
		if j := d.find(was.Frontends[i].Addr); j >= 0 {
			d.Frontends[j].Conflict = was.Frontends[i].Conflict
		}
	}
}
