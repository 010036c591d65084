/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_BACKEND_H
#define TANDEM_BACKEND_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "affinity.h"
#include "btf_emit.h"
#include "frontend.h"
#include "lb_maps.h"

enum select_result {
	SELECT_OK,
	SELECT_REJECT,
	SELECT_DROP,
	SELECT_RACED, /* inconsistent read: try again */
};
BTF_EMIT(select_result);

static __always_inline struct backend *backend_of(__u32 id, __u32 generation,
						  __u32 service)
{
	struct backend *be = bpf_map_lookup_elem(&tdm_backend, &id);

	if (!be || be->generation != generation || be->service != service)
		return NULL;
	return be;
}

/* Whether new connections to this set may get the backend. */
static __always_inline bool is_member(const struct backend *be, __u32 set)
{
	return be->members & (1 << (set % SETS_PER_SERVICE));
}

/*
 * Picks the backend for a new connection. client is the affinity key; pick is a
 * uniformly distributed number that selects a backend if there is no affinity.
 * On SELECT_OK, chosen holds the id and generation of the backend that is
 * returned.
 *
 * User space may update the tables meanwhile. An id that it frees is not reused
 * for a grace period, and then with another generation; a set that no frontend
 * leads to is marked as unused. So stale data is always detected.
 */
static __always_inline struct backend *
select_backend(const struct frontend_ref *fe, const __be32 *client, __u32 pick,
	       struct affinity *chosen, enum select_result *result)
{
	struct affinity_key who = {
		.service = fe->service,
		.family_set = fe->set & ~1u,
	};
	__u32 base, size, index, element, slot, id, generation;
	const struct slots *slots;
	struct affinity *last;
	__u64 word, now = 0;
	struct backend *be;
	__u64 *at;

	if (fe->affinity) {
		copy_addr(who.client, client);
		now = bpf_ktime_get_ns();
		last = affinity_lookup(&who, now, fe->affinity);
		if (last) {
			*chosen = *last;
			barrier(); /* check and use the same copy */
			be = backend_of(chosen->backend, chosen->generation,
					fe->service);
			if (be && is_member(be, fe->set)) {
				last->last_ns = now;
				*result = SELECT_OK;
				return be;
			}
		}
	}

	*result = SELECT_RACED;
	at = bpf_map_lookup_elem(&tdm_set, &fe->set);
	if (!at)
		return NULL;
	word = *(volatile __u64 *)at;
	base = (__u32)word;
	size = word >> 32;
	if (!size) {
		if (base == VERDICT_REJECT)
			*result = SELECT_REJECT;
		else if (base == VERDICT_DROP)
			*result = SELECT_DROP;
		return NULL;
	}

	index = base + (__u32)(((__u64)pick * size) >> 32);
	element = index / SLOTS_PER_ELEMENT;
	slots = bpf_map_lookup_elem(&tdm_slot, &element);
	if (!slots)
		return NULL;
	slot = *(volatile __u32 *)&slots->at[index % SLOTS_PER_ELEMENT];
	id = slot & ((1 << SLOT_GENERATION) - 1);
	be = bpf_map_lookup_elem(&tdm_backend, &id);
	if (!be)
		return NULL;
	generation = *(volatile __u32 *)&be->generation;
	if ((generation << SLOT_GENERATION ^ slot) >> SLOT_GENERATION ||
	    be->service != fe->service)
		return NULL;
	/* Not before: the verifier would follow callers that try again with
	 * another value in it. */
	chosen->backend = id;
	chosen->generation = generation;

	if (fe->affinity) {
		chosen->last_ns = now;
		bpf_map_update_elem(&tdm_affinity, &who, chosen, BPF_ANY);
	}
	*result = SELECT_OK;
	return be;
}

#endif
