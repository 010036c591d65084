/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SOCK_GUARD_H
#define TANDEM_SOCK_GUARD_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "backend.h"
#include "frontend.h"
#include "service_stats.h"
#include "sock_addr.h"
#include "sock_dest.h"
#include "sock_refuse.h"
#include "udp_peer.h"

/* Reads source and destination of a packet that a socket sends. */
static __always_inline bool read_packet(struct __sk_buff *skb, __be32 *source,
					struct peer *to)
{
	struct ipv6hdr ip6;
	struct iphdr ip;
	__be16 ports[2];
	__u32 l4;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (bpf_skb_load_bytes(skb, 0, &ip, sizeof(ip)))
			return false;
		set_v4(source, ip.saddr);
		set_v4(to->addr, ip.daddr);
		l4 = ip.ihl * 4;
	} else {
		if (bpf_skb_load_bytes(skb, 0, &ip6, sizeof(ip6)))
			return false;
		__builtin_memcpy(source, &ip6.saddr, sizeof(ip6.saddr));
		__builtin_memcpy(to->addr, &ip6.daddr, sizeof(ip6.daddr));
		l4 = sizeof(ip6);
	}
	if (bpf_skb_load_bytes(skb, l4, ports, sizeof(ports)))
		return false;
	to->port = ports[1];
	return true;
}

/*
 * Checks the source ranges per packet for sockets whose address was unknown
 * when they were translated: those of pods, where the ranges admit some pods
 * and not others.
 */
static __always_inline int guard(struct __sk_buff *skb)
{
	struct frontend_ref fe = { .flags = FRONTEND_FILTERED };
	struct udp_peer_key key = {};
	struct udp_peer further;
	struct sock_dest *dest;
	struct bpf_sock *sk = skb->sk;
	__be32 source[4];
	struct peer to;

	if (sk)
		sk = bpf_sk_fullsock(sk);
	dest = dest_of(sk);
	if (!dest || (!dest->guarded && !dest->many) ||
	    !read_packet(skb, source, &to))
		return PROCEED;
	if (same(dest->addr, dest->port, to.addr, to.port)) {
		if (!dest->guarded)
			return PROCEED;
		fe.service = dest->service;
	} else {
		if (!dest->many)
			return PROCEED;
		key.cookie = bpf_get_socket_cookie(skb);
		copy_addr(key.addr, to.addr);
		key.port = to.port;
		if (!udp_peer_lookup(&key, &further) || !further.guarded)
			return PROCEED;
		fe.service = further.service;
	}
	if (frontend_admits(&fe, to.addr, source))
		return PROCEED;
	count_connection(fe.service, SELECT_DROP, 0);
	return DENY;
}

#endif
