/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_ROUTE_H
#define TANDEM_ROUTE_H

#include <linux/bpf.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "packet.h"

#define FIB_SOURCE (1U << 4) /* BPF_FIB_LOOKUP_SRC */

/*
 * Looks up the route to an address, and the source address that this node would
 * use. Returns BPF_FIB_LKUP_RET_*.
 */
static __always_inline long route(struct __sk_buff *skb,
				  struct bpf_fib_lookup *fib,
				  const struct flow_key *to, __u16 len,
				  __u32 flags)
{
	__builtin_memset(fib, 0, sizeof(*fib));
	fib->ifindex = skb->ifindex;
	fib->tot_len = len;
	fib->l4_protocol = to->proto;
	fib->sport = to->sport;
	fib->dport = to->dport;
	if (is_v4(to->dst)) {
		fib->family = AF_INET;
		fib->ipv4_src = to->src[3];
		fib->ipv4_dst = to->dst[3];
	} else {
		fib->family = AF_INET6;
		copy_addr(fib->ipv6_src, to->src);
		copy_addr(fib->ipv6_dst, to->dst);
	}
	return bpf_fib_lookup(skb, fib, sizeof(*fib), flags);
}

/* Redirects a packet along a route; the kernel resolves the neighbour. */
static __always_inline long send_out(const struct bpf_fib_lookup *fib)
{
	struct bpf_redir_neigh next = { .nh_family = fib->family };

	/* The next hop may be of the other family; what is in ipv6_dst then is
	 * longer. */
	if (fib->family == AF_INET)
		next.ipv4_nh = fib->ipv4_dst;
	else
		copy_addr(next.ipv6_nh, fib->ipv6_dst);
	return bpf_redirect_neigh(fib->ifindex, &next, sizeof(next), 0);
}

/* One hop less, as a router does. */
static __always_inline long decrement_ttl(struct __sk_buff *skb,
					  const struct packet *p)
{
	__u8 ttl = p->ttl - 1;
	__be16 old, new;
	long err;

	if (p->v6)
		/* No other checksum makes up for it. */
		return bpf_skb_store_bytes(
			skb, p->l3 + offsetof(struct ipv6hdr, hop_limit), &ttl,
			sizeof(ttl), BPF_F_RECOMPUTE_CSUM);
	/* The protocol is the other byte of the word. */
	old = bpf_htons(p->ttl << 8 | p->key.proto);
	new = bpf_htons(ttl << 8 | p->key.proto);
	err = bpf_l3_csum_replace(skb, p->l3 + offsetof(struct iphdr, check),
				  old, new, sizeof(new));
	return err |
	       bpf_skb_store_bytes(skb, p->l3 + offsetof(struct iphdr, ttl),
				   &ttl, sizeof(ttl), 0);
}

#endif
