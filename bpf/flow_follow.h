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
#include "flow_stale.h"
#include "flow_track.h"
#include "forward.h"
#include "global.h"
#include "nat.h"
#include "packet.h"
#include "packet_successor.h"
#include "reasons.h"
#include "tc_config.h"
#include "verdict.h"

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
	/* Requests are translated at one hook, replies at another. */
	if (ingress != (!hit.reply || hit.flags & FLOW_INGRESS))
		return NEXT;
	/* The other proxy may have given this port of the node to a connection
	 * of its own, which is the newer one. Beside one that stays, open TCP
	 * connections keep theirs: the backend would not accept another one
	 * from the same port anyway. */
	if (hit.reply && hit.flags & FLOW_REMOTE &&
	    (serves_old_only() ||
	     (shared_node &&
	      (hit.flags & FLOW_CLOSED || p->key.proto == IPPROTO_UDP))) &&
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
	if (hit.flags & FLOW_REMOTE) {
		if (!hit.reply && serves_old_only() &&
		    !(hit.flags & FLOW_CLOSED))
			hold_port(skb, &hit.flow->reply);
		return forward(skb, p, &hit);
	}
	if (rewrite(skb, p, &hit.to))
		return done(DROP_REWRITE, TC_ACT_SHOT);
	return done(hit.reply ? FORWARD_REPLY : FORWARD_LOCAL, NEXT);
}

#endif
