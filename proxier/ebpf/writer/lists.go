// SPDX-License-Identifier: Apache-2.0

package writer

// lists hands out short slices, several to an allocation. Most service ports have one frontend and few backends, and there
// are many service ports. Memory is freed once none of those that share it is in use, so only few share.
type lists[T any] struct{ spare []T }

// listsTogether is how many elements are allocated at once.
const listsTogether = 16

// take returns a slice of n zero elements that has no room for more.
func (l *lists[T]) take(n int) []T {
	if n > listsTogether/2 {
		return make([]T, n)
	}
	if n > len(l.spare) {
		l.spare = make([]T, listsTogether)
	}
	list := l.spare[:n:n]
	l.spare = l.spare[n:]
	return list
}
