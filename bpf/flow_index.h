/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_INDEX_H
#define TANDEM_FLOW_INDEX_H

#include <linux/bpf.h>
#include <linux/errno.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "flow_entry.h"
#include "flow_filter.h"
#include "flow_key.h"
#include "flow_maps.h"
#include "flow_record.h"
#include "global.h"

/* The flow that a packet belongs to: a copy of what its entry has. */
struct flow_hit {
	struct flow *flow; /* its record; may be reused at any time */
	struct flow_entry *entry;
	__u64 life; /* the generation, in the high half */
	__u32 flags;
	__u32 id;
	__u32 reply; /* 0 or 1 */
	__u32 ingress;
	__u32 action;	    /* enum flow_action */
	__u32 seen;	    /* before this packet, in seconds */
	struct flow_key to; /* addresses and ports after translation */
};

/* Copies an entry, whose word was read before its key was compared. */
static __always_inline bool entry_read(struct flow_entry *e, __u64 word,
				       const struct flow_key *key,
				       struct flow_hit *hit)
{
	__u64 again;

	hit->entry = e;
	hit->id = e->id;
	hit->life = (__u64)e->generation << 32;
	hit->flags = entry_flags(word);
	hit->reply = !!(word & ENTRY_REPLY);
	hit->ingress = e->ingress;
	hit->action = e->action;
	hit->seen = e->seen;
	copy_addr(hit->to.src, e->src);
	copy_addr(hit->to.dst, e->dst);
	hit->to.sport = e->sport;
	hit->to.dport = e->dport;
	hit->to.proto = key->proto;
	hit->to.pad[0] = hit->to.pad[1] = hit->to.pad[2] = 0;
	barrier();
	again = *(volatile __u64 *)&e->word;
	if (again >> 32 != word >> 32 || !is_live(again))
		return false;
	hit->flow = flow_of(hit->id);
	return hit->flow;
}

/* Reads the flow that a word leads to, if the key is one of its two keys. */
static __always_inline bool flow_read(const struct flow_key *key, __u64 known,
				      struct flow_hit *hit)
{
	struct flow_entry *e;
	struct flow *f;
	__u64 word;
	__u32 way;

	f = flow_of(known);
	if (!f || *(volatile __u64 *)&f->life >> 32 != known >> 32)
		return false;
	way = !same_key(&f->request, key);
	e = entry_at(f->place[way & 1]);
	if (!e)
		return false;
	word = *(volatile __u64 *)&e->word;
	barrier();
	return is_live(word) && e->id == (__u32)known &&
	       e->generation == known >> 32 && same_key(&e->key, key) &&
	       entry_read(e, word, key, hit);
}

/* Whether a packet of a flow is translated where it comes in, rather than where
 * it goes out. */
static __always_inline bool is_ingress(const struct flow_hit *hit)
{
	switch (hit->action) {
	case ACTION_LOCAL:
	case ACTION_REMAP_IN:
		return !hit->reply;
	case ACTION_REMAP_OUT:
		return hit->reply;
	}
	return true;
}

/* A flow and a direction, as one number. */
static __always_inline __u64 way_of(const struct flow_hit *hit)
{
	return hit->life >> 32 << 32 | hit->id << 1 | hit->reply;
}

/* Whether a flow is not of a Service. */
static __always_inline bool is_remapped(const struct flow_hit *hit)
{
	return hit->action == ACTION_REMAP_OUT ||
	       hit->action == ACTION_REMAP_IN;
}

/* Finds the flow of a packet, by its addresses and ports on arrival. */
static __always_inline bool flow_find(const struct flow_key *key,
				      struct flow_hit *hit)
{
	__u64 word;
	struct flow_entry *e = entry_of(key, home_of(key), &word);

	return e && entry_read(e, word, key, hit);
}

/* Removes an entry of a flow that this CPU has claimed, and adds up what it
 * counted. */
static __always_inline void key_delete(struct flow *f, __u32 id,
				       __u32 generation, __u32 way,
				       struct flow_traffic *sum)
{
	struct flow_entry *e = entry_at(f->place[way & 1]), *home;
	__u32 first, bit;
	__u64 word;

	if (!e || e->id != id || e->generation != generation)
		return;
	word = *(volatile __u64 *)&e->word;
	if ((word & ENTRY_STATE) < ENTRY_NEW)
		return;
	if (sum) {
		sum->packets += e->packets;
		sum->bytes += e->bytes;
	}
	first = f->place[way & 1] - e->distance;
	home = entry_at(first);
	bit = 1U << (e->distance & 31);
	if (home && __sync_fetch_and_and(&home->near, ~bit) == bit)
		filter_clear(first, &home->near);
	__sync_lock_test_and_set(&e->word,
				 entry_word(word >> 32, 0, ENTRY_FREE));
}

/* Claims a free place near a home. */
static __always_inline struct flow_entry *entry_claim(__u32 home, __u32 *place,
						      __u64 *claimed)
{
	for (__u32 i = 0; i < FLOW_NEAR; i++) {
		struct flow_entry *e = entry_at(home + i);
		__u64 word;

		if (!e)
			return NULL;
		word = *(volatile __u64 *)&e->word;
		*place = home + i;
		*claimed = entry_word((word >> 32) + 1, 0, ENTRY_CLAIMED);
		if ((word & ENTRY_STATE) == ENTRY_FREE &&
		    __sync_val_compare_and_swap(&e->word, word, *claimed) ==
			    word)
			return e;
	}
	return NULL;
}

enum rival {
	RIVAL_NONE,
	RIVAL_BEHIND, /* not live yet, and to give way */
	RIVAL_AHEAD,
};

/* Whether another entry has the same key. */
GLOBAL int entry_rival(__u32 place, __u32 home)
{
	struct flow_entry *own = entry_at(place), *e = entry_at(home);
	enum rival found = RIVAL_NONE;
	__u32 near;

	if (!own || !e)
		return RIVAL_AHEAD;
	near = *(volatile __u32 *)&e->near;
	for (__u32 i = 0; i < FLOW_NEAR && near >> i; i++) {
		__u64 word;

		if (!(near >> i & 1) || home + i == place)
			continue;
		e = entry_at(home + i);
		if (!e)
			break;
		word = *(volatile __u64 *)&e->word;
		barrier();
		if ((word & ENTRY_STATE) < ENTRY_NEW ||
		    !same_key(&e->key, &own->key))
			continue;
		if (is_live(word) || home + i < place)
			return RIVAL_AHEAD;
		found = RIVAL_BEHIND;
	}
	return found;
}

/*
 * Writes the entry of one direction of a flow, shows it to other CPUs that
 * insert the same key, but not to packets. -EEXIST: the key has an entry;
 * -ENOSPC: no place near its home is free.
 */
GLOBAL int flow_enter(__u32 id, __u32 generation, __u32 way)
{
	struct flow_entry *e, *first;
	struct flow *f = flow_of(id);
	const struct flow_key *key, *other;
	__u32 home, place;
	__u64 word;

	if (!f)
		return -ENOENT;
	way &= 1;
	key = way ? &f->reply : &f->request;
	home = home_of(key);
	if (entry_of(key, home, &word))
		return -EEXIST;
	first = entry_at(home);
	e = entry_claim(home, &place, &word);
	if (!first || !e)
		return -ENOSPC;
	e->key = *key;
	e->id = id;
	e->generation = generation;
	e->distance = place - home;
	e->acked = 0;
	e->ingress = f->ingress;
	e->action = f->action;
	e->seen = f->seen;
	e->packets = 0;
	e->bytes = 0;
	/* The other key, reversed. */
	other = way ? &f->request : &f->reply;
	copy_addr(e->src, other->dst);
	copy_addr(e->dst, other->src);
	e->sport = other->dport;
	e->dport = other->sport;
	f->place[way] = place;
	__sync_lock_test_and_set(
		&e->word,
		entry_word(word >> 32, f->flags,
			   way ? ENTRY_NEW | ENTRY_REPLY : ENTRY_NEW));
	__sync_fetch_and_or(&first->near, 1U << ((place - home) & 31));
	filter_set(home);
	return 0;
}

#define RIVAL_ATTEMPTS 8

/*
 * Makes an entry live, or removes it: -EEXIST. If two CPUs insert a key at
 * once, each of them shows its entry before it looks for that of the other one,
 * so at least one of them gives way.
 */
GLOBAL int flow_settle(__u32 id, __u32 generation, __u32 way)
{
	struct flow *f = flow_of(id);
	struct flow_entry *e;
	__u32 place;

	if (!f)
		return -ENOENT;
	way &= 1;
	place = f->place[way];
	e = entry_at(place);
	if (!e)
		return -ENOENT;
	for (int i = 0; i < RIVAL_ATTEMPTS; i++) {
		int rival = entry_rival(place, place - e->distance);

		if (rival == RIVAL_NONE) {
			__sync_fetch_and_or(&e->word, ENTRY_LIVE);
			return 0;
		}
		if (rival == RIVAL_AHEAD)
			break;
	}
	key_delete(f, id, generation, way, NULL);
	return -EEXIST;
}

/* Inserts the entry of one direction of the flow of a word. */
static __always_inline int key_insert(__u64 word, bool reply)
{
	int err = flow_enter(word, word >> 32, reply);

	return err ? err : flow_settle(word, word >> 32, reply);
}

#endif
