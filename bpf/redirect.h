/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_REDIRECT_H
#define TANDEM_REDIRECT_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "next_hop.h"
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

/* Redirects a packet to a next hop; the kernel resolves the neighbour. */
static __always_inline long send_out(struct __sk_buff *skb,
				     const struct next_hop *nh)
{
	struct bpf_redir_neigh next = { .nh_family = nh->family };

	if (nh->redirect == REDIRECT_ROUTE)
		return send_by_route(skb, nh->to);
	if (!l2_len && bpf_skb_change_head(skb, ETH_HLEN, 0))
		return TC_ACT_SHOT;
	if (nh->family == AF_INET)
		next.ipv4_nh = nh->addr[0];
	else
		copy_addr(next.ipv6_nh, nh->addr);
	skb->tc_index = REDIRECTED;
	return bpf_redirect_neigh(nh->to, &next, sizeof(next), 0);
}

/* Whether a packet that leaves was redirected; it is asked once. */
static __always_inline bool was_redirected(struct __sk_buff *skb)
{
	if (skb->tc_index != REDIRECTED)
		return false;
	skb->tc_index = 0;
	return true;
}

#endif
