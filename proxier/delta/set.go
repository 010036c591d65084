// SPDX-License-Identifier: Apache-2.0

package delta

// Set is a Delta of things that are there or not, each of which any number of users
// want: addresses of a device, members of a set, shared chains.
type Set[K comparable] struct {
	*Delta[K, struct{}, struct{}]
	users map[K]int
}

// NewSet makes a Set of nothing, in which order does not matter.
func NewSet[K comparable]() *Set[K] {
	return &Set[K]{New[K, struct{}, struct{}](nil), map[K]int{}}
}

// Use counts users in, or out with by below 0. To replace what a user wants, count
// the new in first: what is in both is then not even pending.
func (s *Set[K]) Use(list []K, by int) {
	for _, k := range list {
		n := s.users[k] + by
		if n > 0 {
			s.users[k] = n
			// A key that the kernel has is as desired: there is nothing to write.
			if item := s.Want(k, struct{}{}); item.There() && !item.Unsure() {
				s.Added(k)
			}
			continue
		}
		delete(s.users, k)
		s.Drop(k)
	}
}

// Added says that a key is in the kernel.
func (s *Set[K]) Added(k K) { s.Done(k, struct{}{}) }

// Found takes over what the kernel has in place of what was known.
func (s *Set[K]) Found(list []K) {
	s.Forget()
	for _, k := range list {
		if s.users[k] > 0 {
			s.Added(k)
		} else {
			s.Adopt(k, struct{}{})
		}
	}
}
