/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_TRACK_H
#define TANDEM_FLOW_TRACK_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/tcp.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "clock.h"
#include "context.h"
#include "flow_index.h"
#include "flow_life.h"
#include "packet.h"
#include "packet_successor.h"

#define MARK_ATTEMPTS 16

/* Shows the flags of a flow in one of its entries. */
static __always_inline void entry_mark(const struct flow *f, __u32 way,
				       __u32 id, __u32 generation, __u32 flags)
{
	struct flow_entry *e = entry_at(f->place[way]);

	if (!e)
		return;
	for (int i = 0; i < MARK_ATTEMPTS; i++) {
		__u64 word = *(volatile __u64 *)&e->word;
		__u64 new = entry_word(word >> 32, flags, word & 0xff);

		barrier();
		if (!is_live(word) || e->id != id ||
		    e->generation != generation ||
		    __sync_val_compare_and_swap(&e->word, word, new) == word)
			return;
	}
}

/* Sets and clears flags of a flow, unless its record was reused, and returns
 * those that it did not have. */
GLOBAL int flow_mark(__u32 id, __u64 life, __u32 set, __u32 clear)
{
	const __u32 fins = FLOW_FIN_REQUEST | FLOW_FIN_REPLY;
	struct flow *f = flow_of(id);
	__u32 generation = life >> 32, flags, fresh;

	if (!f)
		return 0;
	for (int i = 0; i < MARK_ATTEMPTS; i++) {
		__u64 old = *(volatile __u64 *)&f->flags;

		if (old >> 32 != generation)
			return 0;
		flags = ((__u32)old & ~clear) | set;
		if ((flags & fins) == fins)
			flags |= FLOW_CLOSED;
		fresh = flags & ~(__u32)old;
		if (__sync_val_compare_and_swap(&f->flags, old,
						(__u64)generation << 32 |
							flags) == old)
			goto marked;
	}
	return 0;
marked:
	entry_mark(f, 0, id, generation, flags);
	entry_mark(f, 1, id, generation, flags);
	/* A flow that closed before it was established stays young. */
	return flags & FLOW_CLOSED ? fresh & ~FLOW_ESTABLISHED : fresh;
}

/* Notes the device that requests come in by now. */
static __always_inline void flow_came_by(const struct flow_hit *hit,
					 __u32 ifindex)
{
	struct flow *f = hit->flow;
	struct flow_entry *e = entry_at(f->place[1]);

	hit->entry->ingress = ifindex;
	f->ingress = ifindex;
	if (e && e->id == hit->id && e->generation == hit->life >> 32)
		e->ingress = ifindex;
}

/* Bytes from the newest acknowledgement on where a reset may be. An end accepts
 * one at the next byte that it expects (RFC 5961, 3.2), which it may not have
 * acknowledged yet. */
#define RESET_WINDOW (1 << 17)

/* Whether the end that a reset is sent to may accept it. Whoever knows
 * addresses and ports can send others. */
static __always_inline bool may_reset(const struct flow_hit *hit, __be32 seq)
{
	const struct flow_entry *other =
		entry_at(hit->flow->place[!hit->reply]);

	if (!(hit->flags & FLOW_ESTABLISHED) || !other || !other->acked ||
	    other->id != hit->id || other->generation != hit->life >> 32)
		return true;
	return bpf_ntohl(seq) - bpf_ntohl(other->acked) < RESET_WINDOW;
}

/* Flags that a segment sets and clears. An end that goes on sending did not
 * send the reset that seemed to be its own. */
static __always_inline __u32 segment_flags(CONTEXT *ctx,
					   const struct flow_hit *hit,
					   const struct packet *p, __u32 *clear)
{
	const __u32 resets = FLOW_RESET_REQUEST | FLOW_RESET_REPLY;
	const __u32 fins = FLOW_FIN_REQUEST | FLOW_FIN_REPLY;
	__u32 own = hit->reply ? FLOW_RESET_REPLY : FLOW_RESET_REQUEST;
	__be32 numbers[2]; /* of the segment, and of its acknowledgement */
	__u32 flags = 0;

	if (!load(ctx, p->l4 + offsetof(struct tcphdr, seq), numbers,
		  sizeof(numbers)))
		return 0;
	if (p->tcp_flags & TCP_RST)
		return may_reset(hit, numbers[0]) ? FLOW_CLOSED | own : own;
	if (p->tcp_flags & TCP_FIN)
		flags |= hit->reply ? FLOW_FIN_REPLY : FLOW_FIN_REQUEST;
	if (!(p->tcp_flags & TCP_ACK))
		return flags;
	hit->entry->acked = numbers[1];
	if (p->tcp_flags & TCP_SYN)
		return flags;
	if (!hit->reply && hit->flags & FLOW_REPLIED)
		flags |= FLOW_ESTABLISHED;
	if (hit->flags & own) {
		*clear |= own;
		if (!(hit->flags & resets & ~own) &&
		    ((hit->flags | flags) & fins) != fins)
			*clear |= FLOW_CLOSED;
	}
	return flags;
}

/* Flags of a flow whose replies do not come by: a client that sends more than
 * one packet seems to get them. */
static __always_inline __u32 direct_flags(const struct flow_hit *hit,
					  const struct packet *p)
{
	if (p->key.proto == IPPROTO_TCP)
		return p->tcp_flags & TCP_SYN || hit->flags & FLOW_CLOSED ?
			       0 :
			       FLOW_ESTABLISHED;
	return hit->entry->packets > 1 ? FLOW_REPLIED | FLOW_ESTABLISHED : 0;
}

/* Counts a TCP flow whose backend answers the SYN by a reset. */
GLOBAL int flow_count_refused(__u32 id)
{
	struct flow *f = flow_of(id);
	struct service_stats *s;

	if (!f)
		return 0;
	s = stats_of(f);
	if (s)
		__sync_fetch_and_add(&s->refused, 1);
	return 0;
}

/* Accounts for a packet of a flow, and moves the flow to its next stage. */
static __always_inline void
flow_account(CONTEXT *ctx, const struct flow_hit *hit, struct packet *p)
{
	struct flow_entry *e = hit->entry;
	__u64 tick = last_tick();
	__u32 flags = 0, clear = 0, now = tick / NSEC_PER_SEC;
	const bool direct = hit->action == ACTION_DIRECT;

	p->tick = tick;
	/* Without a process that serves, removed backends are not known. UDP
	 * clients may send for ever, so of requests that are not answered only
	 * the first keeps such a flow alive. */
	if (e->seen != now &&
	    (hit->reply || !(hit->flags & FLOW_WAITING) || !serves_old_only()))
		e->seen = hit->flow->seen = now;
	if (hit->reply)
		clear = FLOW_WAITING;
	else if (p->key.proto != IPPROTO_TCP && serves_old_only())
		flags |= FLOW_WAITING;
	if (!hit->reply && hit->ingress != device_of(ctx, p))
		flow_came_by(hit, device_of(ctx, p));
	/* Not atomic: two packets at once on two CPUs may count as one. */
	e->packets++;
	e->bytes += packet_len(ctx) - p->l3;

	if (hit->reply)
		flags |= FLOW_REPLIED;
	if (p->key.proto == IPPROTO_TCP && p->fragment != LATER_FRAGMENT) {
		flags |= segment_flags(ctx, hit, p, &clear);
	} else if (p->key.proto != IPPROTO_TCP && hit->flags & FLOW_REPLIED) {
		flags |= FLOW_ESTABLISHED;
	}
	if (direct)
		flags |= direct_flags(hit, p);
	flags &= ~hit->flags;
	clear &= hit->flags;
	if (!(flags | clear))
		return;
	flags = flow_mark(hit->id, hit->life, flags, clear);
	/* Of direct server return, all that is seen is that the client closes
	 * its half. */
	if (flags & FLOW_CLOSED || (direct && flags & FLOW_FIN_REQUEST)) {
		if (hit->reply && p->tcp_flags & TCP_RST &&
		    !(hit->flags & FLOW_ESTABLISHED))
			flow_count_refused(hit->id);
		if (flow_release(hit->id, hit->life, p->key.proto))
			flow_make_room(flow_word(hit->id, hit->life >> 32),
				       true);
	} else if (flags & FLOW_ESTABLISHED ||
		   (clear & FLOW_CLOSED && hit->flags & FLOW_ESTABLISHED)) {
		if (!direct || direct_admitted(p->key.proto))
			flow_keep(hit->id, hit->life, p->key.proto);
	}
}

#endif
