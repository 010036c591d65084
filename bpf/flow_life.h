/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_LIFE_H
#define TANDEM_FLOW_LIFE_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "backend.h"
#include "clock.h"
#include "failure.h"
#include "flow_index.h"
#include "flow_maps.h"
#include "flow_pool.h"
#include "flow_record.h"
#include "global.h"
#include "lb_maps.h"
#include "tc_config.h"

/* Adds the traffic of a flow to its service, if the service id has not been
 * given to another service. */
static __always_inline void flow_count_traffic(const struct flow *f,
					       const struct flow_traffic *t)
{
	__u32 service = f->service;
	struct service_stats *s;

	if (!t->packets)
		return;
	if (!backend_of(f->backend, f->backend_generation, service))
		service = 0;
	s = bpf_map_lookup_elem(&tdm_svc_stats, &service);
	if (!s)
		return;
	__sync_fetch_and_add(&s->packets, t->packets);
	__sync_fetch_and_add(&s->bytes, t->bytes);
}

/* The statistics of the service of a flow; NULL if that may be another one by
 * now. */
static __always_inline struct service_stats *stats_of(const struct flow *f)
{
	__u32 service = f->service;

	if (!backend_of(f->backend, f->backend_generation, service))
		return NULL;
	return bpf_map_lookup_elem(&tdm_svc_stats, &service);
}

/* Counts a TCP flow that ends without an answer of its backend. */
static __always_inline void flow_count_unanswered(const struct flow *f)
{
	struct service_stats *s;

	if (f->request.proto != IPPROTO_TCP ||
	    f->flags & (FLOW_REPLIED | FLOW_CLOSED) ||
	    f->action == ACTION_DIRECT)
		return;
	s = stats_of(f);
	if (s)
		__sync_fetch_and_add(&s->unanswered, 1);
}

/* Frees a flow that this CPU has claimed. */
static __always_inline void flow_free(__u32 id, struct flow *f,
				      __u32 generation)
{
	struct flow_traffic t = {};

	key_delete(f, id, generation, 0, &t);
	key_delete(f, id, generation, 1, &t);
	flow_count_traffic(f, &t);
	*(volatile __u64 *)&f->life = life_of(generation, FLOW_FREE);
	flow_give(id, f);
}

/* Seconds since its newest packet for which a flow of direct server return
 * stays before others in the ring, and how many of them may at once. */
#define DIRECT_TCP_STAYS_S 3600
#define DIRECT_UDP_STAYS_S 120
#define RING_ATTEMPTS 16

/* Whether a flow in the ring is worth more than one that never got established,
 * although it is not kept. Those that are kept, or gone, need no place there.
 */
static __always_inline bool stays(const struct flow *f, __u64 word)
{
	const __u32 over = FLOW_CLOSED | FLOW_FIN_REQUEST;
	const __u64 flags = *(volatile __u64 *)&f->flags;
	const __u64 life = *(volatile __u64 *)&f->life;

	return f->action == ACTION_DIRECT &&
	       life == life_of(word >> 32, FLOW_YOUNG) &&
	       flags >> 32 == word >> 32 &&
	       (flags & (FLOW_ESTABLISHED | over)) == FLOW_ESTABLISHED &&
	       now_s() - f->seen < (f->request.proto == IPPROTO_TCP ?
					    DIRECT_TCP_STAYS_S :
					    DIRECT_UDP_STAYS_S);
}

/*
 * Enters a flow into the ring of young flows, which is in order of creation,
 * and evicts the young flow whose slot it takes. So flows that never get
 * established evict each other, and no established flow; those of direct server
 * return that are in use go to the next slot. Closed flows have a ring of their
 * own.
 */
GLOBAL int flow_make_room(__u64 word, bool over)
{
	__u64 *turn = flow_counter(over ? FLOW_OVER : FLOW_BORN);
	struct flow *f = NULL;
	__u32 index, id;
	__u64 *place;
	__u64 old;

	if (!turn)
		return 0;
	for (int i = 0; i < RING_ATTEMPTS; i++) {
		index = __sync_fetch_and_add(turn, 1);
		index = over ? max_young + (index & (MAX_CLOSED - 1)) :
			       index & (max_young - 1);
		place = bpf_map_lookup_elem(&tdm_flow_young, &index);
		if (!place)
			return 0;
		old = __sync_lock_test_and_set(place, word);
		id = old;
		if (!id)
			return 0;
		f = flow_of(id);
		if (!f)
			return 0;
		if (over || !stays(f, old))
			break;
		word = old;
	}
	if (!f || __sync_val_compare_and_swap(
			  &f->life, life_of(old >> 32, FLOW_YOUNG),
			  life_of(old >> 32, FLOW_CLAIMED)) !=
			  life_of(old >> 32, FLOW_YOUNG))
		return 0;
	if (!over && !(f->flags & FLOW_CLOSED))
		count_failure(&f->request, PUSHED_OUT);
	flow_count_unanswered(f);
	flow_free(id, f, old >> 32);
	return 0;
}

static __always_inline __u64 *kept_counter(__u8 proto)
{
	return flow_counter(proto == IPPROTO_TCP ? FLOW_KEPT_TCP :
						   FLOW_KEPT_UDP);
}

/*
 * Whether there is room for new flows of a protocol. No flow is refused later,
 * when it is established, so the limit may be exceeded by as many as were young
 * when it was reached. Each protocol has its own limit: a client that only
 * pretends its address can establish UDP flows.
 */
static __always_inline bool flows_admitted(__u8 proto)
{
	const __u64 *kept = kept_counter(proto);

	return kept &&
	       *(volatile __u64 *)kept <
		       (proto == IPPROTO_TCP ? max_kept_tcp : max_kept_udp);
}

/* Whether there is room to keep a flow of direct server return. Its client may
 * only pretend its address, so such flows take half of the room at most. */
static __always_inline bool direct_admitted(__u8 proto)
{
	const __u64 *kept = kept_counter(proto);

	return kept &&
	       *(volatile __u64 *)kept <
		       (proto == IPPROTO_TCP ? max_kept_tcp : max_kept_udp) / 2;
}

/* Keeps a young flow from being evicted. */
GLOBAL int flow_keep(__u32 id, __u64 life, __u8 proto)
{
	__u64 young = life_of(life >> 32, FLOW_YOUNG);
	__u64 *kept = kept_counter(proto);
	struct flow *f = flow_of(id);

	if (!kept || !f)
		return 0;
	__sync_fetch_and_add(kept, 1);
	if (__sync_val_compare_and_swap(
		    &f->life, young, life_of(life >> 32, FLOW_KEPT)) != young)
		__sync_fetch_and_add(kept, -1);
	return 0;
}

/* Makes a closed flow young again; false if it was not kept. */
GLOBAL int flow_release(__u32 id, __u64 life, __u8 proto)
{
	__u64 kept_life = life_of(life >> 32, FLOW_KEPT);
	__u64 *kept = kept_counter(proto);
	struct flow *f = flow_of(id);

	if (!f || __sync_val_compare_and_swap(
			  &f->life, kept_life,
			  life_of(life >> 32, FLOW_YOUNG)) != kept_life)
		return false;
	if (kept)
		__sync_fetch_and_add(kept, -1);
	/* The end that seemed to have closed it may have gone on meanwhile. */
	if (!(*(volatile __u64 *)&f->flags & FLOW_CLOSED) &&
	    f->action != ACTION_DIRECT)
		flow_keep(id, life, proto);
	return true;
}

/* Frees a flow that is replaced, or whose backend is gone. */
GLOBAL int flow_end(__u32 id, __u64 life)
{
	__u64 claimed = life_of(life >> 32, FLOW_CLAIMED);
	__u64 young = life_of(life >> 32, FLOW_YOUNG);
	__u64 kept_life = life_of(life >> 32, FLOW_KEPT);
	struct flow *f = flow_of(id);
	__u64 *kept;

	if (!f)
		return 0;
	if (__sync_val_compare_and_swap(&f->life, young, claimed) == young) {
		flow_free(id, f, life >> 32);
	} else if (__sync_val_compare_and_swap(&f->life, kept_life, claimed) ==
		   kept_life) {
		kept = kept_counter(f->request.proto);
		if (kept)
			__sync_fetch_and_add(kept, -1);
		flow_free(id, f, life >> 32);
	}
	return 0;
}

#endif
