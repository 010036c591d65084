/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_FOLLOW_H
#define TANDEM_FLOW_FOLLOW_H

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "choice.h"
#include "emit.h"
#include "flow_index.h"
#include "flow_key.h"
#include "flow_life.h"
#include "flow_record.h"
#include "flow_stale.h"
#include "flow_track.h"
#include "global.h"
#include "packet.h"
#include "reasons.h"
#include "tc_config.h"
#include "verdict.h"
#include "wrapper.h"

/* Handles a packet as its flow says: the flow that was just made, or the one
 * that its key leads to. */
GLOBAL int follow(struct __sk_buff *skb, struct packet *p, struct choice *made,
		  bool ingress)
{
	bool known = made && made->flow;
	struct flow_hit hit;

	if (!p)
		return NEXT;
	if (known ? !flow_read(&p->key, made->flow, &hit) :
		    !flow_find(&p->key, &hit))
		return NO_FLOW;
	if (ingress != is_ingress(&hit))
		return NEXT;
	if (is_over(p, &hit)) {
		flow_end(hit.id, hit.life);
		return NO_FLOW;
	}
	if (reset_removed && is_orphan(p, &hit)) {
		flow_end(hit.id, hit.life);
		return REFUSED;
	}
	if (p->wrapped == WRAPPED && leads_elsewhere(p, &hit.to))
		return REFUSED;
	flow_account(skb, &hit, p);
	return emit(skb, p, &hit, known);
}

/*
 * Handles a packet that another node translated already, for direct server
 * return: [client -> backend], of a flow to that backend. Only its flow needs
 * to know of it. Whether the backend was removed, the other node knows too.
 */
GLOBAL int follow_translated(struct __sk_buff *skb, struct packet *p)
{
	struct flow_key key;
	struct flow_hit hit;
	__u64 word;

	if (!p)
		return NEXT;
	turn_around(&key, &p->key);
	if (!flow_find(&key, &hit) || !hit.reply || hit.action != ACTION_LOCAL)
		return NO_FLOW;
	key = hit.flow->request;
	word = flow_word(hit.id, hit.life >> 32);
	if (!flow_read(&key, word, &hit) || hit.reply)
		return NO_FLOW;
	flow_account(skb, &hit, p);
	return done(FORWARD_LOCAL, NEXT);
}

#endif
