/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_CHECK_H
#define TANDEM_CHECK_H

#include <linux/types.h>
#include <stddef.h>

/*
 * A lookup in a hash map returns the element itself. The kernel gives an
 * element that was deleted, replaced or evicted to the next key at once and
 * not after a grace period, so what a program reads there may have become the
 * value of another key, or be half written. Hence values carry a check of their
 * key and of what matters in them. A value that passes is whole and the key's
 * own, but for one in 2^32 of the reads that raced.
 *
 * The words are as they are in memory, so that user space gets the same on
 * either byte order (proxier/ebpf/check.go). It is no defence against somebody
 * who looks for collisions: that would also take winning the race.
 */
#define CHECK_FACTOR 0x9e3779b97f4a7c15ULL /* odd, 2^64 / golden ratio */

static __always_inline __u32 check_of(const __u32 *words, size_t n)
{
	__u64 sum = 0;

#pragma unroll
	for (size_t i = 0; i < n; i++)
		sum = (sum + words[i]) * CHECK_FACTOR;
	return sum >> 32 ?: 1; /* 0 is memory that nobody wrote */
}

#endif
