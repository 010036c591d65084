/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_EMIT_H
#define TANDEM_EMIT_H

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "choice.h"
#include "flow_index.h"
#include "mss.h"
#include "nat.h"
#include "next_hop.h"
#include "option_edit.h"
#include "packet.h"
#include "reasons.h"
#include "redirect.h"
#include "route.h"
#include "spread.h"
#include "tc_config.h"
#include "uplink.h"
#include "verdict.h"
#include "wrap.h"

/* Makes of a packet what goes to the backend's node by direct server return, in
 * the form that was configured. */
static __always_inline long make_direct(struct __sk_buff *skb, struct packet *p,
					struct flow_hit *hit, bool first)
{
	long err;

	if (dispatch != DISPATCH_OPT) {
		spread_source(hit, p);
		return wrap(skb, p, &hit->to);
	}
	/* It keeps its client's address. */
	copy_addr(hit->to.src, p->key.src);
	err = rewrite(skb, p, &hit->to, p->ttl - 1);
	if (first || needs_option(p, hit))
		err |= add_option(skb, p);
	return err;
}

/* Translates a packet, or wraps it for direct server return, and redirects it
 * past the stack. */
static __always_inline int forward(struct __sk_buff *skb, struct packet *p,
				   struct flow_hit *hit, bool has_way)
{
	const bool direct = hit->action == ACTION_DIRECT;
	struct bpf_fib_lookup *fib = last_route();
	struct next_hop *nh = next_hop_of(hit);

	if (!fib || !nh)
		return TC_ACT_SHOT;
	if (has_way) {
		next_hop_set(nh, fib);
	} else {
		__u16 len = sent_len(skb, p, hit->action);
		long found;

		if (p->ttl <= 1)
			return EXPIRED;
		if (next_hop_is(nh, hit, p, skb->ifindex, len))
			goto known;
		found = route(skb, p, fib, &hit->to, len, 0);
		if (found == BPF_FIB_LKUP_RET_FRAG_NEEDED) {
			p->mtu = fib->mtu_result - wrapper_len(p, hit->action);
			return TOO_BIG;
		}
		/* The route may come back; the stack would reset the
		 * connection. */
		if (!has_route(found))
			return fail(p, DROP_NO_ROUTE, TC_ACT_SHOT);
		next_hop_set(nh, fib);
		if (found == BPF_FIB_LKUP_RET_SUCCESS)
			next_hop_keep(nh, hit, p, skb->ifindex,
				      fib->mtu_result);
	}
known:
	if (direct ? make_direct(skb, p, hit, has_way) :
		     rewrite(skb, p, &hit->to, p->ttl - 1))
		return fail(p, DROP_REWRITE, TC_ACT_SHOT);
	count_reason(direct	? FORWARD_DIRECT :
		     hit->reply ? FORWARD_REPLY :
				  FORWARD_REMOTE);
	return send_out(skb, nh);
}

/*
 * Redirects a reply that the stack sends by another device than its request
 * came in by, if the route of the frontend's address says so: the stack looked
 * up that of the backend, for which a policy may name another device.
 */
static __always_inline int move_reply(struct __sk_buff *skb, struct packet *p,
				      const struct flow_hit *hit)
{
	struct bpf_fib_lookup *fib = last_route();
	struct next_hop *nh = next_hop_of(hit);

	if (!fib || !nh ||
	    !has_route(route_of_host(skb, fib, &hit->to, wire_len(skb, p))) ||
	    fib->ifindex == skb->ifindex || !uplink_of(fib->ifindex))
		return NEXT;
	next_hop_set(nh, fib);
	return send_out(skb, nh);
}

/* Carries out the action of a flow on a packet. has_way: the route is the
 * last that was looked up. */
static __always_inline int emit(struct __sk_buff *skb, struct packet *p,
				struct flow_hit *hit, bool has_way)
{
	if (hit->action == ACTION_SNAT || hit->action == ACTION_DIRECT)
		return forward(skb, p, hit, has_way);
	if (hit->flags & FLOW_WRAPPED && hit->reply && p->tcp_flags & TCP_SYN &&
	    lower_mss(skb, p, hit->flags))
		return fail(p, DROP_REWRITE, TC_ACT_SHOT);
	if (rewrite(skb, p, &hit->to, p->ttl))
		return fail(p, DROP_REWRITE, TC_ACT_SHOT);
	if (is_remapped(hit))
		return done(REMAP, NEXT);
	count_reason(hit->reply ? FORWARD_REPLY : FORWARD_LOCAL);
	if (hit->reply && role == ROLE_UPLINK && hit->ingress != skb->ifindex)
		return move_reply(skb, p, hit);
	return NEXT;
}

#endif
