// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"unsafe"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
)

// The structures of bpf/lb_types.h under their Go names.
type (
	frontendKey   = sockFrontendKey
	frontendValue = sockFrontend
	backendEntry  = sockBackend
	serviceEntry  = sockService
	serviceStats  = sockServiceStats
	rangeKey      = sockRangeKey
	nodeEntry     = sockNode
	nodePrefix    = sockPrefix
	metaEntry     = sockMeta
	sockDest      = sockSockDest
)

// What bpf/lb_maps.h says of the layout.
const (
	metaMagic     = 0x6d65646e6174
	layoutVersion = 3
)

// States and reasons of a serviceEntry.
const (
	serviceFree       = 0
	serviceProgrammed = 1
	serviceUnplaced   = 2
)

// tables are the maps that hold the decisions. The arrays are the maps' own
// memory: a store is what a program reads next.
type tables struct {
	frontends    frontendMap
	ranges       smallMap[rangeKey, uint8]
	locals       smallMap[[4]uint32, uint32]
	vips         smallMap[[4]uint32, uint8]
	meta         *metaEntry
	nodes        []nodeEntry
	sets         []uint64
	slots        []uint64
	backends     []backendEntry
	services     []serviceEntry
	serviceStats []serviceStats
	backendStats []uint64

	mapped [][]byte
}

// unmap gives the memory back; the maps themselves live on in the kernel. Any
// later access is a crash.
func (t *tables) unmap() {
	for _, b := range t.mapped {
		_ = unix.Munmap(b) // fails only for what was never mapped
	}
	*t = tables{}
}

// frontendMap is the one table that is not an array. Deleting what is absent
// succeeds.
type frontendMap interface {
	// Update writes all or, with an error, the first n.
	Update(keys []frontendKey, values []frontendValue) (n int, err error)
	Delete(keys []frontendKey) error
	Lookup(key frontendKey) (frontendValue, bool, error)
	Dump(fn func(frontendKey, frontendValue)) error
	MaxEntries() int
}

// smallMap is a map that is written entry by entry. Deleting what is absent
// succeeds.
type smallMap[K comparable, V any] interface {
	Put(K, V) error
	Delete(K) error
	Dump(fn func(K, V)) error
	MaxEntries() int
}

// Scopes of a frontendKey.
const (
	scopeAddress = 0
	scopeNode    = 1
)

// setWord is what the set map holds of one set.
func setWord(base uint32, size int) uint64 { return uint64(base) | uint64(size)<<32 }

func splitSetWord(w uint64) (base uint32, size int) { return uint32(w), int(w >> 32) }

// unusedSet is the word of a set that no frontend leads to: a program that comes
// there was led by one that was changed meanwhile, and looks again.
const unusedSet = 0

// emptySet is the word of a set in use that has no backends.
func emptySet(v proxier.Verdict) uint64 { return uint64(v) + 1 }

// verdictOf is what emptySet was given.
func verdictOf(base uint32) (v proxier.Verdict, ok bool) {
	return proxier.Verdict(base - 1), base != unusedSet
}

func slotWord(id, generation uint32) uint64 { return uint64(id) | uint64(generation)<<32 }

// bpfAddr is an address as the programs see it: 16 bytes in network order,
// IPv4 mapped into IPv6.
func bpfAddr(a netip.Addr) [4]uint32 {
	b := a.As16()
	return *(*[4]uint32)(unsafe.Pointer(&b))
}

func goAddr(a [4]uint32) netip.Addr {
	return netip.AddrFrom16(*(*[16]byte)(unsafe.Pointer(&a))).Unmap()
}

// bpfPort is a port in network byte order.
func bpfPort(p uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], p)
	return binary.NativeEndian.Uint16(b[:])
}

func goAddrPort(a [4]uint32, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(goAddr(a), bpfPort(port))
}

// mapping views the memory of an mmap-able array as Go values. The bytes are
// for unmapping it.
func mapping[T any](m *ciliumebpf.Map) ([]T, []byte, error) {
	var element T
	size := unsafe.Sizeof(element)
	if size%8 != 0 {
		return nil, nil, fmt.Errorf("elements of %d bytes: the kernel rounds them up to 8", size)
	}
	length := int(m.MaxEntries()) * int(size)
	page := os.Getpagesize()
	b, err := unix.Mmap(m.FD(), 0, (length+page-1)&^(page-1), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, fmt.Errorf("map the memory of %s: %w", m, err)
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), m.MaxEntries()), b, nil
}

// view appends the mapping of from to those of t.
func view[T any](t *tables, to *[]T, from *ciliumebpf.Map) error {
	list, b, err := mapping[T](from)
	if err != nil {
		return err
	}
	*to = list
	t.mapped = append(t.mapped, b)
	return nil
}

// openTables maps the maps of the programs.
func openTables(m *sockMaps) (*tables, error) {
	t := &tables{
		frontends: &kernelFrontends{m: m.TdmFrontend},
		ranges:    kernelMap[rangeKey, uint8]{m.TdmRange},
		locals:    kernelMap[[4]uint32, uint32]{m.TdmLocal},
	}
	var meta []metaEntry
	err := errors.Join(
		view(t, &meta, m.TdmMeta),
		view(t, &t.nodes, m.TdmNode),
		view(t, &t.sets, m.TdmSet),
		view(t, &t.slots, m.TdmSlot),
		view(t, &t.backends, m.TdmBackend),
		view(t, &t.services, m.TdmService),
		view(t, &t.serviceStats, m.TdmSvcStats),
		view(t, &t.backendStats, m.TdmBeStats),
	)
	if err != nil {
		t.unmap()
		return nil, err
	}
	t.meta = &meta[0]
	return t, nil
}

// kernelFrontends is the real frontend map. Entries that exist are written in
// place, under their lock: an update without it replaces the element, and a
// program that is just walking the bucket may then find neither
// (bpf/frontend.h).
type kernelFrontends struct{ m *ciliumebpf.Map }

var (
	updateInPlace = &ciliumebpf.BatchOptions{ElemFlags: uint64(ciliumebpf.UpdateLock)}
	lookupWhole   = &ciliumebpf.BatchOptions{ElemFlags: uint64(ciliumebpf.LookupLock)}
)

func (k *kernelFrontends) MaxEntries() int { return int(k.m.MaxEntries()) }

func (k *kernelFrontends) Update(keys []frontendKey, values []frontendValue) (int, error) {
	if len(keys) == 1 {
		if err := k.m.Update(&keys[0], &values[0], ciliumebpf.UpdateLock); err != nil {
			return 0, err
		}
		return 1, nil
	}
	n, err := k.m.BatchUpdate(keys, values, updateInPlace)
	if err != nil && n == len(keys) {
		n = 0 // refused as a whole, and the count left as it was
	}
	if err != nil && errors.Is(err, ciliumebpf.ErrNotSupported) {
		for n = range keys {
			if err := k.m.Update(&keys[n], &values[n], ciliumebpf.UpdateLock); err != nil {
				return n, err
			}
		}
		return len(keys), nil
	}
	return n, err
}

func (k *kernelFrontends) Delete(keys []frontendKey) error {
	for len(keys) > 0 {
		n, err := 0, error(nil)
		if len(keys) > 1 {
			n, err = k.m.BatchDelete(keys, nil)
		} else if err = k.m.Delete(&keys[0]); err == nil {
			n = 1
		}
		switch {
		case err == nil:
		case errors.Is(err, ciliumebpf.ErrKeyNotExist):
			n++ // that one is gone already
		case errors.Is(err, ciliumebpf.ErrNotSupported):
			for i := range keys {
				if err := k.m.Delete(&keys[i]); err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
					return err
				}
			}
			return nil
		default:
			return err
		}
		keys = keys[min(n, len(keys)):]
	}
	return nil
}

func (k *kernelFrontends) Lookup(key frontendKey) (frontendValue, bool, error) {
	var value frontendValue
	err := k.m.LookupWithFlags(&key, &value, ciliumebpf.LookupLock)
	if errors.Is(err, ciliumebpf.ErrKeyNotExist) {
		return value, false, nil
	}
	return value, err == nil, err
}

func (k *kernelFrontends) Dump(fn func(frontendKey, frontendValue)) error {
	const chunk = 8192
	keys, values := make([]frontendKey, chunk), make([]frontendValue, chunk)
	var cursor ciliumebpf.MapBatchCursor
	for {
		n, err := k.m.BatchLookup(&cursor, keys, values, lookupWhole)
		for i := range n {
			fn(keys[i], values[i])
		}
		switch {
		case err == nil:
		case errors.Is(err, ciliumebpf.ErrKeyNotExist):
			return nil
		case errors.Is(err, ciliumebpf.ErrNotSupported):
			var key frontendKey
			var value frontendValue
			all := k.m.Iterate()
			for all.Next(&key, &value) {
				fn(key, value)
			}
			return all.Err()
		default:
			return err
		}
	}
}

// kernelMap is a real smallMap.
type kernelMap[K comparable, V any] struct{ m *ciliumebpf.Map }

func (k kernelMap[K, V]) MaxEntries() int { return int(k.m.MaxEntries()) }

func (k kernelMap[K, V]) Put(key K, value V) error { return k.m.Put(&key, &value) }

func (k kernelMap[K, V]) Delete(key K) error {
	if err := k.m.Delete(&key); err != nil && !errors.Is(err, ciliumebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

func (k kernelMap[K, V]) Dump(fn func(K, V)) error {
	var key K
	var value V
	all := k.m.Iterate()
	for all.Next(&key, &value) {
		fn(key, value)
	}
	return all.Err()
}
