/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FORWARD_H
#define TANDEM_FORWARD_H

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "flow_index.h"
#include "nat.h"
#include "packet.h"
#include "reasons.h"
#include "redirect.h"
#include "route.h"
#include "verdict.h"

/* Length on the wire of the longest packet that this one is sent as. */
static __always_inline __u16 wire_len(const struct __sk_buff *skb,
				      const struct packet *p)
{
	if (skb->gso_size)
		return p->l4 - p->l3 + p->l4_len + skb->gso_size;
	return p->l3_len;
}

/* Translates a packet and redirects it past the stack. */
static __always_inline int forward(struct __sk_buff *skb, struct packet *p,
				   const struct flow_hit *hit)
{
	struct bpf_fib_lookup fib;
	long found;

	if (p->ttl <= 1)
		return EXPIRED;
	found = route(skb, &fib, &hit->to, wire_len(skb, p), 0);
	if (found == BPF_FIB_LKUP_RET_FRAG_NEEDED) {
		p->mtu = fib.mtu_result;
		return TOO_BIG;
	}
	/* The route may come back; the stack would reset the connection. */
	if (found != BPF_FIB_LKUP_RET_SUCCESS &&
	    found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return done(DROP_NO_ROUTE, TC_ACT_SHOT);
	if (rewrite(skb, p, &hit->to) || decrement_ttl(skb, p))
		return done(DROP_REWRITE, TC_ACT_SHOT);
	count_reason(hit->reply ? FORWARD_REPLY : FORWARD_REMOTE);
	return send_out(&fib);
}

#endif
