// SPDX-License-Identifier: Apache-2.0

package delta

import "iter"

// store has the items of a Delta by key. An item stays where it is in memory until it
// is removed.
type store[K, D comparable, A any] interface {
	get(K) *Item[D, A] // nil for none
	add(K) *Item[D, A] // of a key that has none
	remove(K)
	len() int
	all() iter.Seq2[K, *Item[D, A]]
}

// anyKey is a store for keys of all kinds.
type anyKey[K, D comparable, A any] map[K]*Item[D, A]

func (s anyKey[K, D, A]) get(k K) *Item[D, A] { return s[k] }

func (s anyKey[K, D, A]) add(k K) *Item[D, A] {
	i := &Item[D, A]{}
	s[k] = i
	return i
}

func (s anyKey[K, D, A]) remove(k K) { delete(s, k) }

func (s anyKey[K, D, A]) len() int { return len(s) }

func (s anyKey[K, D, A]) all() iter.Seq2[K, *Item[D, A]] {
	return func(yield func(K, *Item[D, A]) bool) {
		for k, i := range s {
			if !yield(k, i) {
				return
			}
		}
	}
}

// dense is a store for small numbers, most of which are in use: items lie side by side, in
// chunks so that they never move.
type dense[D comparable, A any] struct {
	chunks []*[chunkLength]Item[D, A]
	known  int
}

const chunkLength = 256

func (s *dense[D, A]) get(k uint32) *Item[D, A] {
	if n := k / chunkLength; n < uint32(len(s.chunks)) {
		if i := &s.chunks[n][k%chunkLength]; i.known {
			return i
		}
	}
	return nil
}

func (s *dense[D, A]) add(k uint32) *Item[D, A] {
	for k/chunkLength >= uint32(len(s.chunks)) {
		s.chunks = append(s.chunks, new([chunkLength]Item[D, A]))
	}
	s.known++
	i := &s.chunks[k/chunkLength][k%chunkLength]
	i.known = true
	return i
}

func (s *dense[D, A]) remove(k uint32) {
	if i := s.get(k); i != nil {
		*i = Item[D, A]{}
		s.known--
	}
}

func (s *dense[D, A]) len() int { return s.known }

func (s *dense[D, A]) all() iter.Seq2[uint32, *Item[D, A]] {
	return func(yield func(uint32, *Item[D, A]) bool) {
		for n, c := range s.chunks {
			for at := range c {
				if i := &c[at]; i.known && !yield(uint32(n*chunkLength+at), i) {
					return
				}
			}
		}
	}
}
