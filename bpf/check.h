/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_CHECK_H
#define TANDEM_CHECK_H

#include <linux/types.h>
#include <stddef.h>

#include "btf_emit.h"

/*
 * A lookup in a hash map returns the element itself. The kernel reuses an
 * element that was deleted, replaced or evicted for the next key at once,
 * without a grace period. So a program may read the value of another key, or a
 * value that is being written. Hence values carry a check of their key and of
 * the fields that matter. A value that passes is complete and belongs to the
 * key; of the reads that raced, one in 2^32 passes wrongly.
 *
 * The words are as they are in memory, so that user space gets the same on
 * either byte order (proxier/ebpf/lbmap/frontend.go). The check is no
 * protection against an attacker who looks for collisions, who would also have
 * to win the race.
 */
enum check_factor {
	CHECK_FACTOR = 0x9e3779b97f4a7c15ULL, /* odd, 2^64 / golden ratio */
};
BTF_EMIT(check_factor);

static __always_inline __u32 check_of(const __u32 *words, size_t n)
{
	__u64 sum = 0;

#pragma unroll
	for (size_t i = 0; i < n; i++)
		sum = (sum + words[i]) * CHECK_FACTOR;
	return sum >> 32 ?: 1; /* 0 stands for memory that was never written */
}

#endif
