/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_HOST_SOCK_H
#define TANDEM_HOST_SOCK_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "flow_types.h"
#include "global.h"
#include "node.h"
#include "packet.h"

/* Fills in a zeroed tuple and returns its size. */
static __always_inline __u32 sock_tuple(const struct flow_key *key,
					struct bpf_sock_tuple *tuple)
{
	if (is_v4(key->src)) {
		tuple->ipv4.saddr = key->src[3];
		tuple->ipv4.daddr = key->dst[3];
		tuple->ipv4.sport = key->sport;
		tuple->ipv4.dport = key->dport;
		return sizeof(tuple->ipv4);
	}
	copy_addr(tuple->ipv6.saddr, key->src);
	copy_addr(tuple->ipv6.daddr, key->dst);
	tuple->ipv6.sport = key->sport;
	tuple->ipv6.dport = key->dport;
	return sizeof(tuple->ipv6);
}

/* Whether a socket of this host gets packets with a key. */
static __always_inline bool host_has_socket(struct __sk_buff *skb,
					    const struct flow_key *key)
{
	struct bpf_sock_tuple tuple = {};
	__u32 size = sock_tuple(key, &tuple);
	struct bpf_sock *sk;

	if (key->proto == IPPROTO_TCP)
		sk = bpf_skc_lookup_tcp(skb, &tuple, size, BPF_F_CURRENT_NETNS,
					0);
	else
		sk = bpf_sk_lookup_udp(skb, &tuple, size, BPF_F_CURRENT_NETNS,
				       0);
	if (!sk)
		return false;
	bpf_sk_release(sk);
	return true;
}

/*
 * Whether a TCP packet is of a connection of this host's, which has the port of
 * a frontend: it began before there was that frontend, or nothing keeps the
 * kernel from choosing that port. Conntrack may not know it, as where no rule
 * needs it.
 */
GLOBAL int host_is_connected(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *sk;
	bool connected;
	__be32 dst[4];
	__u32 size;

	if (!p || p->key.proto != IPPROTO_TCP)
		return false;
	copy_addr(dst, p->key.dst);
	if (!local_flags(dst))
		return false;
	size = sock_tuple(&p->key, &tuple);
	sk = bpf_skc_lookup_tcp(skb, &tuple, size, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	connected = sk->state != BPF_TCP_LISTEN;
	bpf_sk_release(sk);
	return connected;
}

#endif
