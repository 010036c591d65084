/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_ANSWER_H
#define TANDEM_ANSWER_H

#include <linux/bpf.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "flow_key.h"
#include "global.h"
#include "next_hop.h"
#include "packet.h"
#include "reasons.h"
#include "redirect.h"
#include "route.h"
#include "tc_config.h"
#include "verdict.h"

#define ANSWER_TTL 64

/* Sends an answer by the route to the sender of a packet, which may be by
 * another device than the packet came in by. */
GLOBAL int send_to_sender(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_fib_lookup *fib = last_route();
	struct next_hop *nh = next_hop_at(NEXT_HOPS);
	struct flow_key to;

	if (!p || !fib || !nh)
		return TC_ACT_SHOT;
	turn_around(&to, &p->key);
	if (!has_route(route(skb, p, fib, &to, 1, 0)))
		return done(DROP_NO_ROUTE, TC_ACT_SHOT);
	next_hop_set(nh, fib);
	return send_out(skb, nh);
}

/* Sends a packet back to where it came from; one that came by direct server
 * return, to the client. */
static __always_inline int bounce(struct __sk_buff *skb, const struct packet *p)
{
	__u8 mac[2][6], swapped[2][6];

	if (p->wrapped == WRAPPED)
		return send_to_sender(skb, p);
	if (!l2_len)
		return send_by_route(skb, skb->ifindex);
	if (bpf_skb_load_bytes(skb, 0, mac, sizeof(mac)))
		return TC_ACT_SHOT;
	__builtin_memcpy(swapped[0], mac[1], sizeof(mac[1]));
	__builtin_memcpy(swapped[1], mac[0], sizeof(mac[0]));
	if (bpf_skb_store_bytes(skb, 0, swapped, sizeof(swapped), 0))
		return TC_ACT_SHOT;
	skb->tc_index = REDIRECTED;
	return bpf_redirect(skb->ifindex, 0);
}

/* Sets the length in the IP header, and a fresh hop limit. */
static __always_inline long set_ip(struct __sk_buff *skb,
				   const struct packet *p, __u16 length)
{
	__be16 ttl[2], len[2];
	__u8 hops = ANSWER_TTL;
	long err;

	if (p->v6) {
		len[1] = bpf_htons(length - sizeof(struct ipv6hdr));
		return bpf_skb_store_bytes(
			       skb,
			       p->l3 + offsetof(struct ipv6hdr, payload_len),
			       &len[1], sizeof(len[1]), 0) |
		       bpf_skb_store_bytes(
			       skb, p->l3 + offsetof(struct ipv6hdr, hop_limit),
			       &hops, sizeof(hops), 0);
	}
	if (bpf_skb_load_bytes(skb, p->l3 + offsetof(struct iphdr, tot_len),
			       &len[0], sizeof(len[0])))
		return -1;
	len[1] = bpf_htons(length);
	ttl[0] = bpf_htons(p->ttl << 8 | p->key.proto);
	ttl[1] = bpf_htons(ANSWER_TTL << 8 | p->key.proto);
	err = bpf_l3_csum_replace(skb, p->l3 + offsetof(struct iphdr, check),
				  len[0], len[1], 2);
	err |= bpf_l3_csum_replace(skb, p->l3 + offsetof(struct iphdr, check),
				   ttl[0], ttl[1], 2);
	err |= bpf_skb_store_bytes(skb, p->l3 + offsetof(struct iphdr, tot_len),
				   &len[1], sizeof(len[1]), 0);
	return err |
	       bpf_skb_store_bytes(skb, p->l3 + offsetof(struct iphdr, ttl),
				   &hops, sizeof(hops), 0);
}

#endif
