/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_FILTER_H
#define TANDEM_FLOW_FILTER_H

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "flow_maps.h"

/*
 * A set bit without an entry costs a look at the home. A clear bit hides an
 * entry: whoever clears one looks again, and sets it if there is an entry now.
 */
static __always_inline __u64 *filter_of(__u32 home)
{
	__u32 index = home / 64;

	return bpf_map_lookup_elem(&tdm_flow_filter, &index);
}

/* Whether an entry may have its home here. */
static __always_inline bool filter_has(__u32 home)
{
	const __u64 *bits = filter_of(home);

	return bits && *(volatile __u64 *)bits >> (home % 64) & 1;
}

/* After the bit of an entry is set in near. */
static __always_inline void filter_set(__u32 home)
{
	__u64 *bits = filter_of(home);

	if (bits && !(*(volatile __u64 *)bits >> (home % 64) & 1))
		__sync_fetch_and_or(bits, 1ULL << (home % 64));
}

/* After the last bit in near was cleared. */
static __always_inline void filter_clear(__u32 home, const __u32 *near)
{
	__u64 *bits = filter_of(home);

	if (!bits)
		return;
	__sync_fetch_and_and(bits, ~(1ULL << (home % 64)));
	if (*(volatile __u32 *)near)
		__sync_fetch_and_or(bits, 1ULL << (home % 64));
}

#endif
