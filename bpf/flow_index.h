/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_INDEX_H
#define TANDEM_FLOW_INDEX_H

#include <linux/bpf.h>
#include <linux/errno.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "flow_key.h"
#include "flow_maps.h"
#include "flow_record.h"

/*
 * The flow that a packet belongs to. Its record may be reused for another flow
 * at any time: what is needed of it is copied, and the copy counts only if the
 * generation was the same before and after.
 */
struct flow_hit {
	struct flow *flow;
	__u64 life;
	__u32 flags;
	__u32 id;
	__u32 reply;	    /* 0 or 1 */
	struct flow_key to; /* addresses and ports after translation */
};

/* Reads the flow that a word leads to, if the key is one of its two keys. */
static __always_inline bool flow_read(const struct flow_key *key, __u64 found,
				      struct flow_hit *hit)
{
	struct flow *f;

	hit->id = found;
	f = flow_of(hit->id);
	if (!f)
		return false;
	hit->flow = f;
	hit->life = *(volatile __u64 *)&f->life;
	if (hit->life >> 32 != found >> 32 || stage_of(hit->life) < FLOW_NEW)
		return false;
	barrier();
	hit->flags = f->flags;
	if (same_key(&f->request, key)) {
		hit->reply = 0;
		turn_around(&hit->to, &f->reply);
	} else if (same_key(&f->reply, key)) {
		hit->reply = 1;
		turn_around(&hit->to, &f->request);
	} else {
		return false;
	}
	barrier();
	return *(volatile __u64 *)&f->life >> 32 == found >> 32;
}

/* Finds the flow of a packet, by its addresses and ports on arrival. */
static __always_inline bool flow_find(const struct flow_key *key,
				      struct flow_hit *hit)
{
	/* Linux 6.1 takes map keys from the stack, but not from the caller of a
	 * global function. */
	struct flow_key own = *key;
	const __u64 *word = bpf_map_lookup_elem(&tdm_flow_key, &own);

	return word && flow_read(key, *(volatile __u64 *)word, hit);
}

/* Whether a key leads to a flow that has this key. */
static __always_inline bool key_is_live(const struct flow_key *key)
{
	const __u64 *word = bpf_map_lookup_elem(&tdm_flow_key, key);
	struct flow *f;
	__u64 life;

	if (!word)
		return false;
	f = flow_of((__u32)*word);
	if (!f)
		return false;
	life = *(volatile __u64 *)&f->life;
	return life >> 32 == *word >> 32 && stage_of(life) != FLOW_FREE &&
	       (same_key(&f->request, key) || same_key(&f->reply, key));
}

/*
 * Inserts a key, or replaces one that is stale. Before Linux 6.4 only the low
 * half of what bpf_map_update_elem() returns is the error (kernel commit
 * d7ba4cc900bf).
 */
static __always_inline int key_insert(const struct flow_key *key, __u64 word)
{
	int err = bpf_map_update_elem(&tdm_flow_key, key, &word, BPF_NOEXIST);

	if (err == -EEXIST && !key_is_live(key))
		err = bpf_map_update_elem(&tdm_flow_key, key, &word, BPF_ANY);
	return err;
}

#endif
