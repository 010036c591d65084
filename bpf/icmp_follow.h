/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_ICMP_FOLLOW_H
#define TANDEM_ICMP_FOLLOW_H

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "flow_index.h"
#include "flow_key.h"
#include "global.h"
#include "icmp_quote.h"
#include "nat.h"
#include "next_hop.h"
#include "option_edit.h"
#include "packet.h"
#include "reasons.h"
#include "redirect.h"
#include "route.h"
#include "spread.h"
#include "tc_config.h"
#include "verdict.h"
#include "wrap.h"
#include "wrapper.h"

/* Sends an ICMP error to the backend of a key, with an option. */
static __always_inline long translate_error(struct __sk_buff *skb,
					    const struct packet *p,
					    const struct flow_key *backend)
{
	struct flow_key to = p->key;

	copy_addr(to.dst, backend->dst);
	return rewrite_fields(skb, p, &to) | set_ttl(skb, p, p->ttl - 1) |
	       add_option(skb, p);
}

/* Redirects an ICMP error that was translated. */
GLOBAL int forward_error(struct __sk_buff *skb, struct packet *p)
{
	struct bpf_fib_lookup *fib = last_route();
	struct next_hop *nh = next_hop_at(NEXT_HOPS);
	struct wrapper *w = last_wrapper();
	const struct flow_key *to;
	long found, err;

	if (!p || !fib || !nh || !w)
		return TC_ACT_SHOT;
	if (p->ttl <= 1)
		return done(ERROR_TTL, TC_ACT_SHOT);
	to = p->wrapped == TO_WRAP ? &w->hit.to : &p->key;
	found = route(skb, p, fib, to, 1, 0);
	if (!has_route(found))
		return done(DROP_NO_ROUTE, TC_ACT_SHOT);
	if (p->wrapped != TO_WRAP)
		err = set_ttl(skb, p, p->ttl - 1);
	else if (dispatch == DISPATCH_OPT)
		err = translate_error(skb, p, to);
	else {
		spread_source(&w->hit, p);
		err = wrap(skb, p, to);
	}
	if (err)
		return done(DROP_REWRITE, TC_ACT_SHOT);
	count_reason(FORWARD_ICMP);
	next_hop_set(nh, fib);
	return send_out(skb, nh);
}

/* Finds the flow of a quoted packet, which was translated before. */
static __always_inline bool flow_find_quoted(const struct flow_key *quoted,
					     struct flow_hit *hit)
{
	struct flow_key key;

	turn_around(&key, quoted);
	return flow_find(&key, hit);
}

/* The stack gets what is of no flow, but not what came by direct server return:
 * it would send that on, whatever source and destination it has. */
static __always_inline int of_no_flow(const struct packet *p)
{
	return p->wrapped == WRAPPED ? fail(p, DROP_NO_TARGET, TC_ACT_SHOT) :
				       NEXT;
}

/* Translates an ICMP error about a packet of a flow. */
GLOBAL int follow_error(struct __sk_buff *skb, struct packet *p, bool ingress)
{
	struct wrapper *w = last_wrapper();
	struct packet inner = {};
	struct flow_hit *hit;

	if (!p || !w)
		return NEXT;
	hit = &w->hit;
	if (!parse_quote(skb, p, p->l4 + sizeof(struct icmp_error), &inner) ||
	    !flow_find_quoted(&inner.key, hit) || ingress != is_ingress(hit) ||
	    (hit->action == ACTION_DIRECT && p->wrapped == WRAPPED))
		return of_no_flow(p);
	if (hit->action == ACTION_DIRECT) {
		/* The backend's node translates it. */
		p->wrapped = TO_WRAP;
		return PAST_STACK;
	}
	if (rewrite_error(skb, p, &inner, hit))
		return done(DROP_REWRITE, TC_ACT_SHOT);
	return hit->action == ACTION_SNAT ? PAST_STACK :
					    done(FORWARD_ICMP, NEXT);
}

#endif
