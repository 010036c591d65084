/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_ICMP_ERROR_H
#define TANDEM_ICMP_ERROR_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "answer.h"
#include "btf_emit.h"
#include "clock.h"
#include "csum.h"
#include "global.h"
#include "icmp.h"
#include "packet.h"
#include "reasons.h"

enum icmp_limit {
	/* Per CPU; the kernel's own default (icmp_msgs_per_sec). */
	ERRORS_PER_SECOND = 1000,
};
BTF_EMIT(icmp_limit);

struct error_budget {
	__u32 second;
	__u32 sent;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct error_budget);
	__uint(max_entries, 1);
} tdm_budget SEC(".maps");

static __always_inline bool may_send_error(void)
{
	const __u32 zero = 0;
	struct error_budget *b = bpf_map_lookup_elem(&tdm_budget, &zero);
	__u32 now = now_s();

	if (!b)
		return false;
	if (b->second != now) {
		b->second = now;
		b->sent = 0;
	}
	return b->sent++ < ERRORS_PER_SECOND;
}

/* IP headers and extensions up to this length are quoted. */
#define QUOTE_MAX 96

/* Length of the quote: the IP header and 8 bytes, or the TCP header, whose
 * checksum may still have to be completed. */
static __always_inline __u32 quote_len(const struct packet *p)
{
	return p->l4 - p->l3 + (p->key.proto == IPPROTO_TCP ? 20 : 8);
}

/*
 * Turns a packet into an ICMP error about it, from the packet's destination.
 * info is the second word of the ICMP header.
 */
GLOBAL int icmp_error(struct __sk_buff *skb, struct packet *p, __u8 type,
		      __u8 code, __u32 info)
{
	__u8 quote[QUOTE_MAX] = {};
	struct icmp_error icmp = {
		.type = type,
		.code = code,
		.info = bpf_htonl(info),
	};
	__u32 len, head;
	__u64 sum;

	if (!p || !may_send_error())
		return TC_ACT_SHOT;
	len = quote_len(p);
	if (len > QUOTE_MAX || len < 28 || p->l3_len < len ||
	    bpf_skb_load_bytes(skb, p->l3, quote, len) ||
	    bpf_skb_change_tail(skb, p->l3 + len, 0))
		return TC_ACT_SHOT;
	head = (p->v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) +
	       sizeof(icmp);
	if (bpf_skb_adjust_room(skb, head, BPF_ADJ_ROOM_MAC, 0))
		return TC_ACT_SHOT;
	sum = bpf_csum_diff(NULL, 0, (__be32 *)quote, sizeof(quote), 0);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&icmp, sizeof(icmp), sum);
	if (p->v6) {
		struct ipv6hdr ip = {
			.version = 6,
			.payload_len = bpf_htons(len + sizeof(icmp)),
			.nexthdr = IPPROTO_ICMPV6,
			.hop_limit = ANSWER_TTL,
		};

		__builtin_memcpy(&ip.saddr, p->key.dst, 16);
		__builtin_memcpy(&ip.daddr, p->key.src, 16);
		sum = bpf_csum_diff(NULL, 0, (__be32 *)&ip.saddr, 32, sum);
		sum += bpf_htons(len + sizeof(icmp));
		sum += bpf_htons(IPPROTO_ICMPV6);
		if (bpf_skb_store_bytes(skb, p->l3, &ip, sizeof(ip), 0))
			return TC_ACT_SHOT;
	} else {
		struct iphdr ip = {
			.version = 4,
			.ihl = 5,
			.tot_len = bpf_htons(len + head),
			.ttl = ANSWER_TTL,
			.protocol = IPPROTO_ICMP,
			.saddr = p->key.dst[3],
			.daddr = p->key.src[3],
		};

		ip.check = ~fold(
			bpf_csum_diff(NULL, 0, (__be32 *)&ip, sizeof(ip), 0));
		if (bpf_skb_store_bytes(skb, p->l3, &ip, sizeof(ip), 0))
			return TC_ACT_SHOT;
	}
	icmp.check = ~fold(sum);
	if (bpf_skb_store_bytes(skb, p->l3 + head - sizeof(icmp), &icmp,
				sizeof(icmp), 0))
		return TC_ACT_SHOT;
	return bounce(skb, p);
}

/* Tells the sender that the TTL of a packet ended here, that it is too big, or
 * what a router said: that there is no way. */
static __always_inline int send_error(struct __sk_buff *skb, struct packet *p,
				      enum reason reason)
{
	count_reason(reason);
	if (is_icmp(p) || p->fragment == LATER_FRAGMENT)
		return TC_ACT_SHOT;
	if (reason == ERROR_TTL)
		return icmp_error(
			skb, p, p->v6 ? ICMPV6_TIME_EXCEED : ICMP_TIME_EXCEEDED,
			0, 0);
	if (reason == FORWARD_ICMP)
		return icmp_error(
			skb, p, p->v6 ? ICMPV6_DEST_UNREACH : ICMP_DEST_UNREACH,
			p->v6 ? ICMPV6_ADDR_UNREACH : ICMP_HOST_UNREACH, 0);
	if (p->v6)
		return icmp_error(skb, p, ICMPV6_PKT_TOOBIG, 0, p->mtu);
	/* Also if the packet may be fragmented: this program cannot do it, but
	 * the sender can. */
	return icmp_error(skb, p, ICMP_DEST_UNREACH, ICMP_FRAG_NEEDED, p->mtu);
}

#endif
