/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_H
#define TANDEM_FLOW_H

#include <linux/bpf.h>
#include <linux/errno.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "clock.h"
#include "flow_maps.h"
#include "packet.h"
#include "reasons.h"
#include "select.h"
#include "tc_config.h"

/* What a packet found. The record may change hands meanwhile: what is needed
 * of it is copied, and its life was the same before and after. */
struct flow_hit {
	struct flow *flow;
	__u64 life;
	__u32 flags;
	__u32 id;
	__u32 reply;	    /* 0 or 1 */
	struct flow_key to; /* what the packet becomes */
};

static __always_inline __u64 life_of(__u32 generation, enum flow_stage stage)
{
	return (__u64)generation << 32 | stage;
}

static __always_inline __u32 stage_of(__u64 life)
{
	return life & 0xff;
}

static __always_inline __u64 flow_word(__u32 id, __u32 generation)
{
	return (__u64)generation << 32 | id;
}

static __always_inline bool same_key(const struct flow_key *a,
				     const struct flow_key *b)
{
	return same_addr(a->src, b->src) && same_addr(a->dst, b->dst) &&
	       a->sport == b->sport && a->dport == b->dport &&
	       a->proto == b->proto;
}

static __always_inline void turn_around(struct flow_key *to,
					const struct flow_key *from)
{
	copy_addr(to->src, from->dst);
	copy_addr(to->dst, from->src);
	to->sport = from->dport;
	to->dport = from->sport;
	to->proto = from->proto;
	to->pad[0] = to->pad[1] = to->pad[2] = 0;
}

static __always_inline __u64 *flow_counter(enum flow_count which)
{
	__u32 index = which;
	struct flow_counter *c = bpf_map_lookup_elem(&tdm_flow_count, &index);

	return c ? &c->value : NULL;
}

static __always_inline struct flow *flow_of(__u32 id)
{
	return bpf_map_lookup_elem(&tdm_flow, &id);
}

#define STACK_ATTEMPTS 16

/*
 * Free ids are a stack, whose last one is still in the cache. The count in the
 * top word tells a top that went and came back from one that stayed. Whoever
 * meets others that often that it gives up loses the id, and says so: the next
 * process takes it back.
 */
static __always_inline void flow_give(__u32 id, struct flow *f)
{
	__u64 *top = flow_counter(FLOW_TOP);
	__u64 *used = flow_counter(FLOW_USED);

	if (!top || !used)
		return;
	for (int i = 0; i < STACK_ATTEMPTS; i++) {
		__u64 old = *(volatile __u64 *)top;
		__u64 new = ((old >> 32) + 1) << 32 | id;

		*(volatile __u32 *)&f->next = old;
		if (__sync_val_compare_and_swap(top, old, new) == old) {
			__sync_fetch_and_add(used, -1);
			return;
		}
	}
	*(volatile __u64 *)&f->life |= FLOW_CLAIMED;
}

/* A free id, or 0. */
static __always_inline __u32 flow_take(void)
{
	__u64 *top = flow_counter(FLOW_TOP);
	__u64 *fresh = flow_counter(FLOW_FRESH);
	__u64 *used = flow_counter(FLOW_USED);

	if (!top || !fresh || !used)
		return 0;
	for (int i = 0; i < STACK_ATTEMPTS; i++) {
		__u64 old = *(volatile __u64 *)top;
		const struct flow *f;
		__u64 new;

		if (!(__u32)old)
			break;
		f = flow_of(old);
		if (!f)
			return 0;
		new = ((old >> 32) + 1) << 32 | *(volatile __u32 *)&f->next;
		if (__sync_val_compare_and_swap(top, old, new) == old) {
			__sync_fetch_and_add(used, 1);
			return old;
		}
	}
	if (*(volatile __u64 *)fresh < max_flows) {
		__u64 id = __sync_fetch_and_add(fresh, 1) + 1;

		if (id < max_flows) {
			__sync_fetch_and_add(used, 1);
			return id;
		}
	}
	return 0;
}

/* Counts what a flow carried for its service, if its id still is its own. */
static __always_inline void flow_count_up(const struct flow *f)
{
	__u32 service = f->service;
	struct service_stats *s;

	if (!f->packets[0])
		return;
	if (!backend_of(f->backend, f->backend_generation, service))
		service = 0;
	s = bpf_map_lookup_elem(&tdm_svc_stats, &service);
	if (!s)
		return;
	__sync_fetch_and_add(&s->packets, f->packets[0] + f->packets[1]);
	__sync_fetch_and_add(&s->bytes, f->bytes[0] + f->bytes[1]);
}

/* Ends a flow that this CPU has claimed. */
static __always_inline void flow_bury(__u32 id, struct flow *f,
				      __u32 generation)
{
	if (f->flags & FLOW_INDEXED) {
		bpf_map_delete_elem(&tdm_flow_key, &f->request);
		bpf_map_delete_elem(&tdm_flow_key, &f->reply);
	}
	flow_count_up(f);
	*(volatile __u64 *)&f->life = life_of(generation, FLOW_FREE);
	flow_give(id, f);
}

/*
 * The young stand in a ring, in the order of their birth. Whoever gets the
 * place of one that is still young ends it: so those who never get anywhere
 * push out each other, and nobody else. Those that are over have another ring.
 */
GLOBAL int flow_make_room(__u64 word, bool over)
{
	__u64 *turn = flow_counter(over ? FLOW_OVER : FLOW_BORN);
	__u32 index, id;
	struct flow *f;
	__u64 *place;
	__u64 old;

	if (!turn)
		return 0;
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
	if (!f || __sync_val_compare_and_swap(
			  &f->life, life_of(old >> 32, FLOW_YOUNG),
			  life_of(old >> 32, FLOW_CLAIMED)) !=
			  life_of(old >> 32, FLOW_YOUNG))
		return 0;
	if (!over && !(f->flags & FLOW_CLOSED))
		count_reason(PUSHED_OUT);
	flow_bury(id, f, old >> 32);
	return 0;
}

/* Reads the flow that a word means, if the key is one of its own. */
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

/* Finds the flow of a packet that is as it arrived. */
static __always_inline bool flow_find(const struct flow_key *key,
				      struct flow_hit *hit)
{
	/* Linux 6.1 takes keys from the stack, and not from callers of
	 * functions that are verified once. */
	struct flow_key own = *key;
	const __u64 *word = bpf_map_lookup_elem(&tdm_flow_key, &own);

	return word && flow_read(key, *(volatile __u64 *)word, hit);
}

static __always_inline __u64 *kept_counter(__u8 proto, __u64 *most)
{
	*most = proto == IPPROTO_TCP ? max_kept_tcp : max_kept_udp;
	return flow_counter(proto == IPPROTO_TCP ? FLOW_KEPT_TCP :
						   FLOW_KEPT_UDP);
}

/* The young one is no longer pushed out, if there is room. */
GLOBAL int flow_keep(__u32 id, __u64 life, __u8 proto)
{
	__u64 young = life_of(life >> 32, FLOW_YOUNG);
	__u64 most, *kept = kept_counter(proto, &most);
	struct flow *f = flow_of(id);

	if (!kept || !f)
		return 0;
	if (__sync_fetch_and_add(kept, 1) >= most ||
	    __sync_val_compare_and_swap(
		    &f->life, young, life_of(life >> 32, FLOW_KEPT)) != young)
		__sync_fetch_and_add(kept, -1);
	return 0;
}

/* One that is over may be pushed out again. */
GLOBAL int flow_release(__u32 id, __u64 life, __u8 proto)
{
	__u64 kept_life = life_of(life >> 32, FLOW_KEPT);
	__u64 most, *kept = kept_counter(proto, &most);
	struct flow *f = flow_of(id);

	if (!f || __sync_val_compare_and_swap(
			  &f->life, kept_life,
			  life_of(life >> 32, FLOW_YOUNG)) != kept_life)
		return 0;
	if (kept)
		__sync_fetch_and_add(kept, -1);
	return flow_make_room(flow_word(id, life >> 32), true);
}

/* Ends a flow whose client begins anew. */
GLOBAL int flow_end(__u32 id, __u64 life)
{
	__u64 claimed = life_of(life >> 32, FLOW_CLAIMED);
	__u64 young = life_of(life >> 32, FLOW_YOUNG);
	__u64 kept_life = life_of(life >> 32, FLOW_KEPT);
	struct flow *f = flow_of(id);
	__u64 most, *kept;

	if (!f)
		return 0;
	if (__sync_val_compare_and_swap(&f->life, young, claimed) == young) {
		flow_bury(id, f, life >> 32);
	} else if (__sync_val_compare_and_swap(&f->life, kept_life, claimed) ==
		   kept_life) {
		kept = kept_counter(f->request.proto, &most);
		if (kept)
			__sync_fetch_and_add(kept, -1);
		flow_bury(id, f, life >> 32);
	}
	return 0;
}

/* Accounts for a packet of a flow, and for what it means to the flow. */
static __always_inline void flow_account(const struct flow_hit *hit,
					 const struct packet *p, __u32 len)
{
	struct flow *f = hit->flow;
	__u32 flags = 0, all, now = now_s();
	__u32 way = hit->reply & 1; /* the verifier wants it said */

	/* While draining nobody says when a backend is gone: of UDP, whose
	 * clients may ask on for ever, it has to answer. */
	if (f->seen != now &&
	    (!draining || hit->reply || p->key.proto == IPPROTO_TCP))
		f->seen = now;
	/* Packets of one direction that meet on two CPUs may count as one. */
	f->packets[way]++;
	f->bytes[way] += len;

	if (hit->reply)
		flags |= FLOW_REPLIED;
	if (p->key.proto == IPPROTO_TCP && p->fragment != LATER_FRAGMENT) {
		if (p->tcp_flags & TCP_FIN)
			flags |= hit->reply ? FLOW_FIN_REPLY : FLOW_FIN_REQUEST;
		if (p->tcp_flags & TCP_RST)
			flags |= FLOW_CLOSED;
		if (!hit->reply && hit->flags & FLOW_REPLIED &&
		    (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_ACK)
			flags |= FLOW_ESTABLISHED;
	} else if (p->key.proto != IPPROTO_TCP && hit->flags & FLOW_REPLIED) {
		flags |= FLOW_ESTABLISHED;
	}
	all = hit->flags | flags;
	if ((all & (FLOW_FIN_REQUEST | FLOW_FIN_REPLY)) ==
	    (FLOW_FIN_REQUEST | FLOW_FIN_REPLY))
		flags |= FLOW_CLOSED;
	flags &= ~hit->flags;
	if (!flags)
		return;
	__sync_fetch_and_or(&f->flags, flags);
	if (flags & FLOW_CLOSED)
		flow_release(hit->id, hit->life, p->key.proto);
	else if (flags & FLOW_ESTABLISHED && !(all & FLOW_CLOSED))
		flow_keep(hit->id, hit->life, p->key.proto);
}

enum flow_created {
	FLOW_MADE,
	FLOW_NO_ROOM,	/* no id, or the kernel has no memory */
	FLOW_PORT_USED, /* another flow has that reply key: try another port */
	FLOW_OUTRUN,	/* another CPU made this very flow */
};

/* Whether a key leads to a flow that has it. */
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

/* Before Linux 6.4 only the low half of what bpf_map_update_elem() returns is
 * the error (kernel commit d7ba4cc900bf). */
static __always_inline int key_insert(const struct flow_key *key, __u64 word)
{
	int err = bpf_map_update_elem(&tdm_flow_key, key, &word, BPF_NOEXIST);

	if (err == -EEXIST && !key_is_live(key))
		err = bpf_map_update_elem(&tdm_flow_key, key, &word, BPF_ANY);
	return err;
}

#endif
