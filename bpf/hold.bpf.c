// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Holds back TCP packets of flows that no program on a device has translated:
 * another process has detached or overtaken the programs, or a new device
 * carries traffic before they are attached. The stack would answer them by a
 * reset, and the connection would be lost although its flow is still there.
 * Held back, they are sent again, and meanwhile the programs are repaired.
 *
 * Netfilter programs (Linux 6.4) are attached by links alone, which end with
 * the process. Without the process, no one repairs them anyway.
 */
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/netfilter.h>
#include <linux/tcp.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "failure.h"
#include "flow_index.h"
#include "flow_key.h"

char __license[] SEC("license") = "Dual BSD/GPL";

/* Types of the kernel, as far as the programs need them. */
struct nf_hook_state;

struct sk_buff {
	int skb_iif; /* the device that it came in by */
} __attribute__((preserve_access_index));

struct bpf_nf_ctx {
	const struct nf_hook_state *state;
	struct sk_buff *skb;
};

extern int bpf_dynptr_from_skb(struct __sk_buff *skb, __u64 flags,
			       struct bpf_dynptr *ptr) __ksym;
extern void *bpf_dynptr_slice(const struct bpf_dynptr *ptr, __u32 offset,
			      void *buffer, __u32 buffer__szk) __ksym;

enum {
	LOOPBACK = 1, /* the index of its device, in every namespace */
};

enum fragment_bits {
	IP_OFFSET_MF = 0x3fff, /* offset, and more fragments */
};

/* Reads the addresses, and the offset of the TCP header: 0 if the packet is no
 * whole TCP packet, or has IPv6 extension headers. */
static __always_inline __u32 read_addresses(struct bpf_dynptr *data, bool v6,
					    struct flow_key *key)
{
	if (v6) {
		struct ipv6hdr space, *ip;

		ip = bpf_dynptr_slice(data, 0, &space, sizeof(space));
		if (!ip || ip->version != 6 || ip->nexthdr != IPPROTO_TCP)
			return 0;
		__builtin_memcpy(key->src, &ip->saddr, sizeof(key->src));
		__builtin_memcpy(key->dst, &ip->daddr, sizeof(key->dst));
		return sizeof(*ip);
	} else {
		struct iphdr space, *ip;

		ip = bpf_dynptr_slice(data, 0, &space, sizeof(space));
		if (!ip || ip->version != 4 || ip->ihl < 5 ||
		    ip->protocol != IPPROTO_TCP ||
		    ip->frag_off & bpf_htons(IP_OFFSET_MF))
			return 0;
		set_v4(key->src, ip->saddr);
		set_v4(key->dst, ip->daddr);
		return ip->ihl * 4;
	}
}

/* Whether a packet with this key may be a translated one, although a packet on
 * arrival could have the same key: packets in the other direction belong to a
 * flow that translates them where they leave. A connection of this host may
 * have the port of the node that a flow has towards the same backend; and a
 * backend in the host's network may have the address and port of a frontend. */
static __always_inline bool may_be_translated(const struct flow_key *key)
{
	struct flow_key opposite;
	struct flow_hit hit;

	turn_around(&opposite, key);
	return flow_find(&opposite, &hit) && !is_ingress(&hit);
}

/*
 * A packet to this host whose key leads to a flow was not translated where it
 * arrived. The same is true of a reset in the place of a translated one, unless
 * its flow shows one: the client answers so to a reply that left without
 * its Service's address. A SYN may begin another connection, which the stack
 * refuses for good reason.
 */
static __always_inline int hold(struct bpf_nf_ctx *ctx, bool v6, bool to_host)
{
	struct flow_key key = { .proto = IPPROTO_TCP };
	struct tcphdr space, *tcp;
	struct bpf_dynptr data;
	struct flow_hit hit;
	__u32 l4;

	/* This host's own connections are translated at their sockets. */
	if (to_host && ctx->skb->skb_iif == LOOPBACK)
		return NF_ACCEPT;
	if (bpf_dynptr_from_skb((struct __sk_buff *)ctx->skb, 0, &data))
		return NF_ACCEPT;
	l4 = read_addresses(&data, v6, &key);
	if (!l4)
		return NF_ACCEPT;
	tcp = bpf_dynptr_slice(&data, l4, &space, sizeof(space));
	if (!tcp)
		return NF_ACCEPT;
	if (tcp->rst) {
		struct flow_key reply;

		key.sport = tcp->source;
		key.dport = tcp->dest;
		turn_around(&reply, &key);
		if (!flow_find(&reply, &hit) || !hit.reply ||
		    hit.action != ACTION_LOCAL ||
		    hit.flags & (FLOW_CLOSED | FLOW_RESET_REQUEST))
			return NF_ACCEPT;
		turn_around(&key, &hit.to); /* client -> frontend */
	} else {
		if (!to_host || (tcp->syn && !tcp->ack))
			return NF_ACCEPT;
		key.sport = tcp->source;
		key.dport = tcp->dest;
		if (!flow_find(&key, &hit) || !is_ingress(&hit) ||
		    may_be_translated(&key))
			return NF_ACCEPT;
	}
	count_failure(&key, HELD_BACK);
	return NF_DROP;
}

/* Packets to sockets of this host. */
SEC("netfilter")
int tdm_hold_in4(struct bpf_nf_ctx *ctx)
{
	return hold(ctx, false, true);
}

SEC("netfilter")
int tdm_hold_in6(struct bpf_nf_ctx *ctx)
{
	return hold(ctx, true, true);
}

/* Packets to pods of this node. */
SEC("netfilter")
int tdm_hold_pod4(struct bpf_nf_ctx *ctx)
{
	return hold(ctx, false, false);
}

SEC("netfilter")
int tdm_hold_pod6(struct bpf_nf_ctx *ctx)
{
	return hold(ctx, true, false);
}
