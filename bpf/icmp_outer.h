/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_ICMP_OUTER_H
#define TANDEM_ICMP_OUTER_H

#include <linux/bpf.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "flow_index.h"
#include "flow_types.h"
#include "global.h"
#include "icmp.h"
#include "icmp_error.h"
#include "icmp_quote.h"
#include "packet.h"
#include "reasons.h"
#include "tc_config.h"
#include "unwrap.h"
#include "verdict.h"
#include "wrapper.h"

/* What an ICMP error of a router tells the sender. */
enum told {
	TELLS_NOTHING,
	TELLS_TOO_BIG,
	TELLS_UNREACHABLE,
};

static __always_inline enum told told_by(const struct packet *p)
{
	const __u8 type = p->key.sport & 0xff, code = p->key.dport & 0xff;

	if (p->v6) {
		if (type == ICMPV6_PKT_TOOBIG)
			return TELLS_TOO_BIG;
		return type == ICMPV6_DEST_UNREACH &&
				       (code == ICMPV6_NO_ROUTE ||
					code == ICMPV6_ADDR_UNREACH) ?
			       TELLS_UNREACHABLE :
			       TELLS_NOTHING;
	}
	if (type != ICMP_DEST_UNREACH)
		return TELLS_NOTHING;
	if (code == ICMP_FRAG_NEEDED)
		return TELLS_TOO_BIG;
	return code == ICMP_NET_UNREACH || code == ICMP_HOST_UNREACH ?
		       TELLS_UNREACHABLE :
		       TELLS_NOTHING;
}

/* Whether an error is about a packet of a flow that this node sent in an IP
 * packet. Both are in last_wrapper() then; returns the length of the outer
 * headers. */
static __always_inline __u32 find_outer_flow(struct __sk_buff *skb,
					     const struct packet *p,
					     struct wrapper *w)
{
	const __u32 outer = p->l4 + sizeof(struct icmp_error);
	const __u32 len = parse_wrapper(skb, outer, w);

	if (!len)
		return 0;
	__builtin_memset(&w->inner, 0, sizeof(w->inner));
	if (!parse_quote(skb, p, outer + len, &w->inner) ||
	    !flow_find(&w->inner.key, &w->hit) ||
	    w->hit.action != ACTION_DIRECT || !same_addr(w->hit.to.dst, w->dst))
		return 0;
	return len;
}

/*
 * Takes the client's packet out of an ICMP error of a router about the packet
 * in which this node sent it on for direct server return: routers tell only
 * this node (RFC 2003, 4.1). The packet is in last_wrapper() then. Returns
 * TOO_BIG or UNREACHABLE, as which the client is to be told.
 */
GLOBAL int unquote(struct __sk_buff *skb, const struct packet *p)
{
	struct wrapper *w = last_wrapper();
	struct packet *inner;
	enum told told;
	__u32 len, taken;
	__be32 info;

	if (!p || !w)
		return NEXT;
	told = told_by(p);
	if (told == TELLS_NOTHING)
		return NEXT;
	len = find_outer_flow(skb, p, w);
	inner = &w->inner;
	if (!len ||
	    bpf_skb_load_bytes(skb, p->l4 + offsetof(struct icmp_error, info),
			       &info, sizeof(info)))
		return NEXT;
	inner->mtu = bpf_ntohl(info);
	if (!inner->v6)
		inner->mtu &= 0xffff; /* the rest is unused (RFC 1191) */
	if (told == TELLS_TOO_BIG && inner->mtu <= len)
		return TC_ACT_SHOT;
	inner->mtu -= len;
	taken = inner->l3 - l2_len;
	if (bpf_skb_adjust_room(skb, -(__s32)taken, BPF_ADJ_ROOM_MAC, 0))
		return NEXT;
	inner->l3 -= taken;
	inner->l4 -= taken;
	inner->wrapped = WRAPPED;
	return told == TELLS_TOO_BIG ? TOO_BIG : UNREACHABLE;
}

/* Follows an ICMP error about no flow, if it is about the outer packet of one.
 * The answer goes by the route to the client, not to the router. */
static __always_inline int follow_outer_error(struct __sk_buff *skb,
					      const struct packet *p)
{
	int verdict = unquote(skb, p);
	struct wrapper *w = last_wrapper();

	if (!w)
		return NEXT;
	switch (verdict) {
	case TOO_BIG:
		return send_error(skb, &w->inner, ERROR_TOO_BIG);
	case UNREACHABLE:
		return send_error(skb, &w->inner, FORWARD_ICMP);
	}
	return verdict;
}

#endif
