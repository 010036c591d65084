/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_NAT_H
#define TANDEM_NAT_H

#include <linux/bpf.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_helpers.h>

#include "packet.h"

/*
 * bpf_l4_csum_replace(): IPv6 has no header checksum that would make up for
 * the change in what the device summed. Since Linux 6.16 and its stable
 * releases; others refuse the flag.
 */
#define CSUM_IPV6 (1ULL << 7)

static __always_inline int csum_offset(__u8 proto)
{
	switch (proto) {
	case IPPROTO_TCP:
		return offsetof(struct tcphdr, check);
	case IPPROTO_UDP:
		return offsetof(struct udphdr, check);
	}
	return 2; /* ICMP, ICMPv6 */
}

/* Corrects the checksum behind a changed pseudo header. */
static __always_inline long csum_addrs(struct __sk_buff *skb, __u32 offset,
				       __s64 diff, __u64 flags, bool v6)
{
	long err;

	flags |= BPF_F_PSEUDO_HDR;
	if (v6) {
		err = bpf_l4_csum_replace(skb, offset, 0, diff,
					  flags | CSUM_IPV6);
		if (!err)
			return 0;
	}
	return bpf_l4_csum_replace(skb, offset, 0, diff, flags);
}

static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* What changing some words adds to a sum, for the helpers that correct one. */
static __always_inline __s64 sum_diff(const __be32 *old, const __be32 *new,
				      int words)
{
	__u64 sum = 0;

	for (int i = 0; i < words; i++)
		sum += (__u64)(__u32)~old[i] + new[i];
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (__u32)((sum & 0xffffffff) + (sum >> 32));
}

struct v4_tail {
	__be16 check;
	__be32 addrs[2];
} __attribute__((packed));

/*
 * Writes addresses and ports, and corrects the checksums, also those that are
 * left to the device and those of packets that are still to be cut to size.
 */
static __always_inline long rewrite(struct __sk_buff *skb,
				    const struct packet *p,
				    const struct flow_key *to)
{
	__u64 flags = p->key.proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	__u32 check = p->l4 + csum_offset(p->key.proto);
	bool has_l4 = p->fragment != LATER_FRAGMENT;
	/* ICMP's checksum does not cover the addresses. */
	bool has_pseudo = has_l4 && p->key.proto != IPPROTO_ICMP;
	__be16 old_ports[2] = { p->key.sport, p->key.dport };
	__be16 new_ports[2] = { to->sport, to->dport };
	__be32 old4[2];
	struct v4_tail v4;
	__s64 diff;
	long err = 0;

	if (p->v6) {
		/* Source and destination are one behind the other. */
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

#endif
