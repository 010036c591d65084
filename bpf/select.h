/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SELECT_H
#define TANDEM_SELECT_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "affinity.h"
#include "lb_maps.h"

/*
 * A set may be republished while we read it. Freed extents and ids rest for
 * seconds before reuse and carry a generation, so a stale read shows and is
 * repeated; one repeat is enough but for a writer that publishes faster than
 * we read.
 */
#define SELECT_ATTEMPTS 8

enum select_result {
	SELECT_OK,
	SELECT_REJECT,
	SELECT_DROP,
	SELECT_RACED,
};

static __always_inline struct backend *backend_of(__u32 id, __u32 generation,
						  __u32 service)
{
	struct backend *be = bpf_map_lookup_elem(&tdm_backend, &id);

	if (!be || be->generation != generation || be->service != service)
		return NULL;
	return be;
}

/* The backend may still be picked for new connections of this set. */
static __always_inline bool is_member(const struct backend *be, __u32 set)
{
	return be->members & (1 << (set & 1));
}

/*
 * Picks the backend for a new connection. client is who asks, for affinity.
 * On SELECT_OK, chosen holds id and generation, and *out the backend.
 */
static __always_inline enum select_result
select_backend(const struct frontend *fe, const __be32 *client,
	       struct affinity *chosen, struct backend **out)
{
	struct affinity_key who = {
		.service = fe->service,
		.family_set = fe->set & ~1u,
	};
	__u64 now = 0;

	if (fe->affinity) {
		struct affinity *last;

		__builtin_memcpy(who.client, client, sizeof(who.client));
		now = bpf_ktime_get_ns();
		last = affinity_lookup(&who, now, fe->affinity);
		if (last) {
			struct backend *be = backend_of(
				last->backend, last->generation, fe->service);

			if (be && is_member(be, fe->set)) {
				chosen->backend = last->backend;
				chosen->generation = last->generation;
				last->last_ns = now;
				*out = be;
				return SELECT_OK;
			}
		}
	}

	for (int i = 0; i < SELECT_ATTEMPTS; i++) {
		__u64 *word = bpf_map_lookup_elem(&tdm_set, &fe->set);
		struct backend *be;
		__u64 set, slot, *at;
		__u32 base, size, index;

		if (!word)
			return SELECT_REJECT;
		set = *(volatile __u64 *)word;
		base = (__u32)set;
		size = set >> 32;
		if (!size)
			return base == VERDICT_DROP ? SELECT_DROP :
						      SELECT_REJECT;

		index = base +
			(__u32)(((__u64)bpf_get_prandom_u32() * size) >> 32);
		at = bpf_map_lookup_elem(&tdm_slot, &index);
		if (!at)
			continue;
		slot = *(volatile __u64 *)at;
		be = backend_of((__u32)slot, slot >> 32, fe->service);
		if (!be)
			continue;

		chosen->backend = (__u32)slot;
		chosen->generation = slot >> 32;
		if (fe->affinity) {
			chosen->last_ns = now;
			bpf_map_update_elem(&tdm_affinity, &who, chosen,
					    BPF_ANY);
		}
		*out = be;
		return SELECT_OK;
	}
	return SELECT_RACED;
}

#endif
