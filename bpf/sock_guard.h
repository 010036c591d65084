/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SOCK_GUARD_H
#define TANDEM_SOCK_GUARD_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "backend.h"
#include "frontend.h"
#include "global.h"
#include "packet.h"
#include "packet_failed.h"
#include "parse.h"
#include "reason.h"
#include "service_stats.h"
#include "sock_addr.h"
#include "sock_dest.h"
#include "sock_refuse.h"
#include "udp_peer.h"

GLOBAL int read_packet(struct __sk_buff *skb, struct packet *p)
{
	if (!p)
		return BROKEN;
	return parse(skb, skb->protocol, p);
}

/*
 * Checks the source ranges per packet, for sockets whose source address is not
 * known for certain when they are translated. A packet of such a socket that
 * cannot be read is dropped.
 */
static __always_inline int guard(struct __sk_buff *skb)
{
	struct frontend_ref fe = { .flags = FRONTEND_FILTERED };
	struct udp_peer_key key = {};
	struct udp_peer further;
	struct sock_dest *dest;
	struct bpf_sock *sk = skb->sk;
	struct packet p = {};
	__be16 vip_port;
	__be32 vip[4];

	if (sk)
		sk = bpf_sk_fullsock(sk);
	dest = dest_of(sk);
	if (!dest || (!dest->guarded && !dest->many))
		return PROCEED;
	fe.service = dest->service;
	copy_addr(vip, dest->vip);
	vip_port = dest->vip_port;
	if (read_packet(skb, &p) != UNDERSTOOD)
		goto drop;
	/* A connection has one destination, even if its packets are addressed
	 * to another host: by a routing header, or by rules of the pod. */
	if (dest->proto != IPPROTO_TCP &&
	    !same(dest->addr, dest->port, p.key.dst, p.key.dport)) {
		if (!dest->many)
			return PROCEED;
		key.cookie = bpf_get_socket_cookie(skb);
		copy_addr(key.addr, p.key.dst);
		key.port = p.key.dport;
		if (!udp_peer_lookup(&key, &further) || !further.guarded)
			return PROCEED;
		fe.service = further.service;
		copy_addr(vip, further.vip);
		vip_port = further.vip_port;
	} else if (!dest->guarded) {
		return PROCEED;
	}
	if (frontend_admits(&fe, p.key.dst, p.key.src))
		return PROCEED;
drop:
	count_connection(fe.service, SELECT_DROP, 0, false);
	copy_addr(p.key.dst, vip);
	p.key.dport = vip_port;
	p.key.proto = dest->proto;
	/* With the frontend as its destination. */
	packet_failed(&p.key, DROP_SOURCE_RANGE);
	return DENY;
}

#endif
