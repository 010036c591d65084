/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_FOLLOW_H
#define TANDEM_FLOW_FOLLOW_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/pkt_cls.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "conntrack.h"
#include "flow_index.h"
#include "flow_life.h"
#include "flow_track.h"
#include "forward.h"
#include "global.h"
#include "nat.h"
#include "packet.h"
#include "reasons.h"
#include "backend.h"
#include "tc_config.h"
#include "verdict.h"

/* Whether a packet starts a new connection in place of its flow, or the flow's
 * backend serves no longer. */
static __always_inline bool is_over(const struct packet *p,
				    const struct flow_hit *hit)
{
	const struct flow *f = hit->flow;

	if (hit->reply)
		return false;
	if (p->key.proto == IPPROTO_TCP) {
		if ((p->tcp_flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
			return false;
		/* Who serves now gets all that is new. */
		if (draining || hit->flags & FLOW_CLOSED)
			return true;
		if (hit->flags & FLOW_ESTABLISHED)
			return false;
	}
	return !backend_of(f->backend, f->backend_generation, f->service);
}

/* Whether a packet is a TCP request to a backend that was removed from the API.
 */
static __always_inline bool is_orphan(const struct packet *p,
				      const struct flow_hit *hit)
{
	const struct flow *f = hit->flow;

	return !hit->reply && p->key.proto == IPPROTO_TCP &&
	       p->fragment == WHOLE &&
	       (__s32)(f->backend_generation - first_generation) >= 0 &&
	       !backend_of(f->backend, f->backend_generation, f->service);
}

/* Translates a packet as its flow says: the flow of the word known, or, if that
 * is 0, the one that its key leads to. */
GLOBAL int follow(struct __sk_buff *skb, struct packet *p, __u64 known,
		  bool ingress)
{
	struct flow_hit hit;

	if (!p)
		return NEXT;
	if (known ? !flow_read(&p->key, known, &hit) :
		    !flow_find(&p->key, &hit))
		return NO_FLOW;
	/* Of requests and replies, each is translated in one place alone. */
	if (ingress != (!hit.reply || hit.flags & FLOW_INGRESS))
		return NEXT;
	/* Who serves now does not know which of this node's ports are taken. */
	if (draining && hit.reply && hit.flags & FLOW_REMOTE &&
	    netfilter_has(skb, p))
		return done(PASS_NETFILTER, NEXT);
	if (is_over(p, &hit)) {
		flow_end(hit.id, hit.life);
		return NO_FLOW;
	}
	if (reset_removed && is_orphan(p, &hit)) {
		flow_end(hit.id, hit.life);
		return REFUSED;
	}
	flow_account(&hit, p, skb->len - p->l3);
	if (hit.flags & FLOW_REMOTE)
		return forward(skb, p, &hit);
	if (rewrite(skb, p, &hit.to))
		return done(DROP_REWRITE, TC_ACT_SHOT);
	return done(hit.reply ? FORWARD_REPLY : FORWARD_LOCAL, NEXT);
}

#endif
