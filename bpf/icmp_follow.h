/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_ICMP_FOLLOW_H
#define TANDEM_ICMP_FOLLOW_H

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "flow_index.h"
#include "flow_key.h"
#include "global.h"
#include "icmp_quote.h"
#include "packet.h"
#include "reasons.h"
#include "redirect.h"
#include "route.h"
#include "verdict.h"

/* Redirects an ICMP error that was translated. */
GLOBAL int forward_error(struct __sk_buff *skb, struct packet *p)
{
	struct bpf_fib_lookup fib;
	long found;

	if (!p)
		return TC_ACT_SHOT;
	if (p->ttl <= 1)
		return done(ERROR_TTL, TC_ACT_SHOT);
	found = route(skb, &fib, &p->key, 1, 0);
	if (found != BPF_FIB_LKUP_RET_SUCCESS &&
	    found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return done(DROP_NO_ROUTE, TC_ACT_SHOT);
	if (decrement_ttl(skb, p))
		return done(DROP_REWRITE, TC_ACT_SHOT);
	count_reason(FORWARD_ICMP);
	return send_out(&fib);
}

/* Translates an ICMP error about a packet of a flow. */
GLOBAL int follow_error(struct __sk_buff *skb, struct packet *p, bool ingress)
{
	struct packet inner = {};
	struct flow_key key;
	struct flow_hit hit;

	if (!p || !parse_quote(skb, p, &inner))
		return NEXT;
	turn_around(&key, &inner.key);
	if (!flow_find(&key, &hit) ||
	    ingress != (!hit.reply || hit.flags & FLOW_INGRESS))
		return NEXT;
	if (rewrite_error(skb, p, &inner, &hit))
		return done(DROP_REWRITE, TC_ACT_SHOT);
	return hit.flags & FLOW_REMOTE ? PAST_STACK : done(FORWARD_ICMP, NEXT);
}

#endif
