/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_REDIRECT_H
#define TANDEM_REDIRECT_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "packet.h"
#include "tc_config.h"
#include "uplink.h"

/*
 * skb->tc_index of a packet that was redirected, up to the egress program of
 * the device. It says that the packet is not from this host's stack.
 */
#define REDIRECTED 0x7d6d

/* Redirects a packet to a device by the kernel's own route lookup. */
static __always_inline long send_by_route(struct __sk_buff *skb, __u32 ifindex)
{
	/* bpf_redirect_neigh() takes a link-layer header off. */
	if (!l2_len && bpf_skb_change_head(skb, ETH_HLEN, 0))
		return TC_ACT_SHOT;
	skb->tc_index = REDIRECTED;
	return bpf_redirect_neigh(ifindex, NULL, 0, 0);
}

/* Redirects a packet along a route; the kernel resolves the neighbour. */
static __always_inline long send_out(struct __sk_buff *skb,
				     const struct bpf_fib_lookup *fib)
{
	struct bpf_redir_neigh next = { .nh_family = fib->family };
	const struct uplink *up = uplink_of(fib->ifindex);

	if (up && up->redirect == REDIRECT_ROUTE)
		return send_by_route(skb, fib->ifindex);
	if (!l2_len && bpf_skb_change_head(skb, ETH_HLEN, 0))
		return TC_ACT_SHOT;
	/* The next hop may be of the other family; then ipv6_dst holds more. */
	if (fib->family == AF_INET)
		next.ipv4_nh = fib->ipv4_dst;
	else
		copy_addr(next.ipv6_nh, fib->ipv6_dst);
	skb->tc_index = REDIRECTED;
	return bpf_redirect_neigh(fib->ifindex, &next, sizeof(next), 0);
}

/* Whether a packet that leaves was redirected; it is asked once. */
static __always_inline bool was_redirected(struct __sk_buff *skb)
{
	if (skb->tc_index != REDIRECTED)
		return false;
	skb->tc_index = 0;
	return true;
}

/* One hop less, as a router does. */
static __always_inline long decrement_ttl(struct __sk_buff *skb,
					  const struct packet *p)
{
	__u8 ttl = p->ttl - 1;
	__be16 old, new;
	long err;

	if (p->v6)
		/* IPv6 has no header checksum to offset the change. */
		return bpf_skb_store_bytes(
			skb, p->l3 + offsetof(struct ipv6hdr, hop_limit), &ttl,
			sizeof(ttl), BPF_F_RECOMPUTE_CSUM);
	/* TTL and protocol are one word for the checksum. */
	old = bpf_htons(p->ttl << 8 | p->key.proto);
	new = bpf_htons(ttl << 8 | p->key.proto);
	err = bpf_l3_csum_replace(skb, p->l3 + offsetof(struct iphdr, check),
				  old, new, sizeof(new));
	return err |
	       bpf_skb_store_bytes(skb, p->l3 + offsetof(struct iphdr, ttl),
				   &ttl, sizeof(ttl), 0);
}

#endif
