// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"

	"github.com/tandem-proxy/tandem/proxier/maglev"
)

// Algorithm is how a connection gets its backend.
type Algorithm uint8

// The algorithms.
const (
	// UnsetAlgorithm leaves the choice to the configuration, and there means Random.
	UnsetAlgorithm Algorithm = iota
	// Random picks any backend, in proportion to weights.
	Random
	// Maglev picks a backend by a hash of the connection. All nodes pick the same, and most connections
	// have the same after a change of the backends.
	Maglev
)

var algorithmNames = [...]string{"", "random", "maglev"}

// ParseAlgorithm reads the name of an algorithm.
func ParseAlgorithm(name string) (Algorithm, error) {
	for a, known := range algorithmNames {
		if name == known && name != "" {
			return Algorithm(a), nil
		}
	}
	return UnsetAlgorithm, fmt.Errorf("unknown algorithm %.32q: want random or maglev", name)
}

func (a Algorithm) String() string { return algorithmNames[a] }

// Balancing is how the connections of a service port are spread over its backends.
type Balancing struct {
	Algorithm Algorithm
	// TableSize is the number of slots of Maglev tables, one of maglev.Sizes; 0 for one that follows from the number of
	// backends.
	TableSize uint32
	// Seed of Maglev's hash. Nodes with the same seed have the same tables.
	Seed uint64
}

// DefaultWeight is the weight of endpoints whose slice names none.
const DefaultWeight = 100

// over returns the balancing of a Service, which has the first word. With direct server return that is Maglev unless the
// Service says otherwise: a connection that arrives at another node from now on has to get the same backend there.
func (b Balancing) over(configured Balancing, direct bool) Balancing {
	switch {
	case b.Algorithm != UnsetAlgorithm:
	case direct:
		b.Algorithm = Maglev
	default:
		b.Algorithm = max(configured.Algorithm, Random)
	}
	if b.Algorithm == Random {
		return Balancing{Algorithm: Random}
	}
	if b.TableSize == 0 {
		b.TableSize = configured.TableSize
	}
	b.Seed = configured.Seed
	return b
}

// How many slots a set with weights has at most: for each backend, and in any case.
const (
	slotsPerBackend = 100
	fewSlots        = 1000
)

// IsPlain reports whether every backend of a set has one slot, in the order of the backends: connections go to all
// alike.
func (d *Decision) IsPlain() bool { return d.Balancing.Algorithm != Maglev && !d.Weighted }

// Weight is the weight of a backend for rules and virtual servers: 1 where all have the same.
func (d *Decision) Weight(b *Backend) int {
	if !d.Weighted {
		return 1
	}
	return int(b.Weight)
}

// TableSize is the size of a set's Maglev table; 0 for sets that have none.
func (d *Decision) TableSize(s Set) int {
	n := d.Size(s)
	if d.Balancing.Algorithm != Maglev || n == 0 {
		return 0
	}
	size := int(d.Balancing.TableSize)
	if size == 0 || n > size {
		size = maglev.SizeFor(n)
	}
	if n > size {
		return 0 // more than the largest table has slots
	}
	return size
}

// Slots returns which backend each slot of a set leads to, as indexes of Backends. A connection takes any slot, or with
// Maglev the one that its hash selects. limit is how many slots there may be, if that is enough for one for each backend: a smaller
// table is taken, or coarser shares.
func (d *Decision) Slots(s Set, limit int) []uint32 {
	var members []uint32
	for i := range d.Backends {
		if d.Backends[i].In(s) {
			members = append(members, uint32(i))
		}
	}
	size := d.TableSize(s)
	for size > limit || size > 0 && size < len(members) {
		size = maglev.Smaller(size)
	}
	if size >= len(members) && size > 0 {
		return d.maglev(members, size)
	}
	if !d.Weighted {
		return members
	}
	return d.repeat(members, limit)
}

// Pick is what Maglev selects for a connection.
type Pick struct {
	Slot, TableSize int
	Backend         *Backend
	// ByClient says that the hash is over the client's address alone.
	ByClient bool
}

// Pick returns what eBPF programs on devices select for a connection, on every node with a table of that size; nil
// without Maglev, or if the client's port is needed and not known.
func (d *Decision) Pick(s Set, from, to netip.AddrPort) *Pick {
	size := d.TableSize(s)
	p := &Pick{TableSize: size, ByClient: d.Affinity != 0}
	var hash uint32
	switch {
	case size == 0:
		return nil
	case p.ByClient:
		hash = maglev.HashClient(from.Addr())
	case from.Port() == 0:
		return nil
	default:
		hash = maglev.HashConnection(from, to, uint8(d.Name.Protocol))
	}
	slots := d.Slots(s, size)
	p.Slot = maglev.Slot(hash, len(slots))
	p.Backend = &d.Backends[slots[p.Slot]]
	return p
}

func (d *Decision) maglev(members []uint32, size int) []uint32 {
	list := make([]maglev.Backend, len(members))
	for i, m := range members {
		list[i] = maglev.Backend{Addr: d.Backends[m].Addr, Weight: uint32(d.Backends[m].Weight)}
	}
	table := make([]uint32, size)
	maglev.Fill(table, list, d.Balancing.Seed)
	for i, at := range table {
		table[i] = members[at]
	}
	return table
}

// repeat gives each backend slots in proportion to its weight: exactly so if that takes few slots, otherwise to within half a
// slot, and one at least. That may be some more than the limit.
func (d *Decision) repeat(members []uint32, limit int) []uint32 {
	sum, divisor := 0, 0
	for _, m := range members {
		weight := int(d.Backends[m].Weight)
		sum += weight
		divisor = gcd(divisor, weight)
	}
	if sum == 0 {
		return members
	}
	total := sum / divisor
	total = min(total, max(fewSlots, slotsPerBackend*len(members)), max(limit, len(members)))
	slots := make([]uint32, 0, total+len(members))
	for _, m := range members {
		n := (int(d.Backends[m].Weight)*total + sum/2) / sum
		for range max(1, n) {
			slots = append(slots, m)
		}
	}
	return slots
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
