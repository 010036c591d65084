/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_ENTRY_H
#define TANDEM_FLOW_ENTRY_H

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "check.h"
#include "flow_filter.h"
#include "flow_key.h"
#include "flow_maps.h"
#include "global.h"
#include "tc_config.h"

/* entry.word: uses of the place, flags of the flow, state. */
static __always_inline __u64 entry_word(__u32 uses, __u32 flags, __u32 state)
{
	return (__u64)uses << 32 | flags << 8 | state;
}

static __always_inline __u32 entry_flags(__u64 word)
{
	return (__u32)word >> 8;
}

static __always_inline bool is_live(__u64 word)
{
	return (word & ENTRY_STATE) == ENTRY_LIVE;
}

static __always_inline struct flow_entry *entry_at(__u32 place)
{
	return bpf_map_lookup_elem(&tdm_flow_entry, &place);
}

/* The place where the search for a key begins. proxier/ebpf/flowtable/hash.go
 * computes the same. */
static __always_inline __u32 home_of(const struct flow_key *key)
{
	const __u64 *words = (const __u64 *)key;
	__u64 hash = flow_seed;

#pragma unroll
	for (int i = 0; i < sizeof(*key) / sizeof(*words); i++) {
		hash = (hash ^ words[i]) * CHECK_FACTOR;
		hash ^= hash >> 32;
	}
	return ((hash & 0xffffffff) * max_homes) >> 32;
}

/* Whether an entry is live and of a key; then word is its word. */
static __always_inline bool is_entry_of(const struct flow_entry *e,
					const struct flow_key *key, __u64 *word)
{
	*word = *(volatile __u64 *)&e->word;
	barrier();
	return is_live(*word) && same_key(&e->key, key);
}

/* The place of the live entry of a key that is not at its home; 0 if there is
 * none. */
GLOBAL int entry_near(const struct flow_key *key, __u32 home)
{
	struct flow_entry *e = entry_at(home);
	__u32 near;
	__u64 word;

	if (!e || !key)
		return 0;
	near = *(volatile __u32 *)&e->near;
	for (int i = 1; i < FLOW_NEAR && near >> i; i++) {
		if (!(near >> i & 1))
			continue;
		e = entry_at(home + i);
		if (e && is_entry_of(e, key, &word))
			return home + i;
	}
	return 0;
}

/* The live entry of a key, and its word; NULL if there is none. */
static __always_inline struct flow_entry *entry_of(const struct flow_key *key,
						   __u32 home, __u64 *word)
{
	struct flow_entry *e;
	__u32 near;

	if (!filter_has(home))
		return NULL;
	e = entry_at(home);
	if (!e)
		return NULL;
	near = *(volatile __u32 *)&e->near;
	if (near & 1 && is_entry_of(e, key, word))
		return e;
	if (!(near >> 1))
		return NULL;
	home = entry_near(key, home);
	e = home ? entry_at(home) : NULL;
	return e && is_entry_of(e, key, word) ? e : NULL;
}

#endif
