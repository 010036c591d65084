/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_NAT_H
#define TANDEM_NAT_H

#include <linux/bpf.h>
#include <linux/errno.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "csum.h"
#include "l4.h"
#include "global.h"
#include "packet.h"
#include "parse.h"
#include "summed.h"

struct v4_tail {
	__be16 check;
	__be32 addrs[2];
} __attribute__((packed));

/*
 * Rewrites addresses and ports field by field, and corrects the checksums,
 * including partial checksums that the device completes, those of packets that
 * are still to be segmented, and that which the device computed of the whole
 * packet.
 */
GLOBAL int rewrite_fields(struct __sk_buff *skb, const struct packet *p,
			  const struct flow_key *to)
{
	__be16 old_ports[2], new_ports[2];
	bool has_l4, has_pseudo;
	__be32 old4[2];
	struct v4_tail v4;
	__u64 flags;
	__u32 check;
	__s64 diff;
	long err = 0;

	if (!p || !to)
		return -EINVAL;
	flags = p->key.proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	check = p->l4 + csum_offset(p->key.proto);
	has_l4 = p->fragment != LATER_FRAGMENT;
	/* ICMP's checksum does not cover the addresses. */
	has_pseudo = has_l4 && p->key.proto != IPPROTO_ICMP;
	old_ports[0] = p->key.sport;
	old_ports[1] = p->key.dport;
	new_ports[0] = to->sport;
	new_ports[1] = to->dport;
	if (p->v6) {
		/* Source and destination are adjacent. */
		diff = sum_diff(p->key.src, to->src, 8);
		err = bpf_skb_store_bytes(
			skb, p->l3 + offsetof(struct ipv6hdr, saddr), to->src,
			32, 0);
	} else {
		old4[0] = p->key.src[3];
		old4[1] = p->key.dst[3];
		v4.addrs[0] = to->src[3];
		v4.addrs[1] = to->dst[3];
		diff = sum_diff(old4, v4.addrs, 2);
		v4.check = ~fold((__u64)(__u16)~p->l3_check + diff);
		err = bpf_skb_store_bytes(skb,
					  p->l3 + offsetof(struct iphdr, check),
					  &v4, sizeof(v4), 0);
	}
	if (has_pseudo)
		err |= csum_addrs(skb, check, diff, flags, p->v6);
	if (!has_l4 || *(__u32 *)old_ports == *(__u32 *)new_ports)
		return err;
	err |= bpf_l4_csum_replace(skb, check, *(__u32 *)old_ports,
				   *(__u32 *)new_ports, flags | 4);
	return err |
	       bpf_skb_store_bytes(skb, p->l4, new_ports, sizeof(new_ports), 0);
}

/* Sets the TTL or hop limit. */
static __always_inline long set_ttl(struct __sk_buff *skb,
				    const struct packet *p, __u8 ttl)
{
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

/* Headers from the TTL or hop limit to the checksum of TCP or UDP. */
struct header_part {
	__u8 head[7];
	__u8 hop_limit;
	union {
		__be32 addrs[8]; /* of IPv6 */
		struct {
			__u8 no_part_of_v4[20];
			__u8 ttl;
			__u8 proto;
			__sum16 check;
			__be32 addrs4[2];
		};
	};
	__u8 l4[TCP_PART];
};

/* Rewrites TTL, addresses, ports and checksums of a packet whose headers have
 * no options between them, in one piece. */
GLOBAL int rewrite_part(struct __sk_buff *skb, const struct packet *p,
			const struct flow_key *to, __u8 ttl, bool partial)
{
	const __u32 end = offsetof(struct header_part, l4);
	struct header_part part;
	__be32 old4[2];
	__s64 diff;
	__u32 from, len;
	bool udp;

	if (!p || !to)
		return -EINVAL;
	udp = to->proto == IPPROTO_UDP;
	if (!(udp ? load(skb, p->l4, part.l4, UDP_PART) :
		    load(skb, p->l4, part.l4, TCP_PART)))
		return -EFAULT;
	len = udp ? UDP_PART : TCP_PART;
	if (p->v6) {
		from = offsetof(struct header_part, hop_limit);
		part.hop_limit = ttl;
		/* Source and destination are adjacent. */
		diff = sum_diff(p->key.src, to->src, 8);
		__builtin_memcpy(part.addrs, to->src, sizeof(part.addrs));
		rewrite_l4(part.l4, to, diff, udp, partial);
		return bpf_skb_store_bytes(
			skb, p->l3 + offsetof(struct ipv6hdr, hop_limit),
			&part.hop_limit, end - from + len, 0);
	}
	from = offsetof(struct header_part, ttl);
	part.ttl = ttl;
	part.proto = to->proto;
	old4[0] = p->key.src[3];
	old4[1] = p->key.dst[3];
	part.addrs4[0] = to->src[3];
	part.addrs4[1] = to->dst[3];
	diff = sum_diff(old4, part.addrs4, 2);
	rewrite_l4(part.l4, to, diff, udp, partial);
	/* TTL and protocol are one word for the checksum. */
	diff += (__u16)~bpf_htons(p->ttl << 8 | to->proto);
	diff += bpf_htons(ttl << 8 | to->proto);
	part.check = ~fold((__u64)(__u16)~p->l3_check + diff);
	return bpf_skb_store_bytes(skb, p->l3 + offsetof(struct iphdr, ttl),
				   &part.ttl, end - from + len, 0);
}

/* Rewrites TTL, addresses, ports and checksums. */
static __always_inline long rewrite(struct __sk_buff *skb,
				    const struct packet *p,
				    const struct flow_key *to, __u8 ttl)
{
	int summed = summed_of(skb);
	long err;

	if (summed != SUMMED_UNKNOWN && summed != SUMMED_COMPLETE &&
	    p->fragment != LATER_FRAGMENT &&
	    p->l4 == p->l3 + (p->v6 ? sizeof(struct ipv6hdr) :
				      sizeof(struct iphdr)))
		return rewrite_part(skb, p, to, ttl, summed == SUMMED_PARTIAL);
	err = rewrite_fields(skb, p, to);
	return ttl == p->ttl ? err : err | set_ttl(skb, p, ttl);
}

#endif
