/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_WRAP_H
#define TANDEM_WRAP_H

#include <linux/bpf.h>
#include <linux/errno.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "csum.h"
#include "flow_key.h"
#include "global.h"
#include "nat.h"
#include "packet.h"
#include "wrapper.h"

#define WRAPPER_TTL 64
#define IP_DF 0x4000

static __always_inline __sum16 header_check(const struct iphdr *ip)
{
	const __u16 *words = (const __u16 *)ip;
	__u64 sum = 0;

#pragma unroll
	for (int i = 0; i < sizeof(*ip) / sizeof(*words); i++)
		sum += words[i];
	return ~fold(sum);
}

/* Puts an IPv4 header before a packet. Its size was checked, so routers must
 * not fragment it. The class is the packet's, with the marks of ECN. */
static __always_inline long wrap_v4(struct __sk_buff *skb,
				    const struct flow_key *to)
{
	struct iphdr ip = {
		.version = 4,
		.ihl = sizeof(ip) / 4,
		.frag_off = bpf_htons(IP_DF),
		.ttl = WRAPPER_TTL,
		.protocol = IPPROTO_IPIP,
		.saddr = to->src[3],
		.daddr = to->dst[3],
	};

	if (bpf_skb_load_bytes(skb, l2_len + offsetof(struct iphdr, tos),
			       &ip.tos, sizeof(ip.tos)))
		return -EFAULT;
	if (bpf_skb_adjust_room(skb, sizeof(ip), BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO |
					BPF_F_ADJ_ROOM_ENCAP_L3_IPV4))
		return -ENOMEM;
	ip.tot_len = bpf_htons(skb->len - l2_len);
	ip.check = header_check(&ip);
	return bpf_skb_store_bytes(skb, l2_len, &ip, sizeof(ip), 0);
}

static __always_inline long wrap_v6(struct __sk_buff *skb,
				    const struct flow_key *to)
{
	struct wrapper *w = last_wrapper();
	struct ipv6hdr *ip;
	__be32 first; /* version, class, flow label */

	if (!w)
		return -EFAULT;
	ip = &w->header.v6;
	if (bpf_skb_load_bytes(skb, l2_len, &first, sizeof(first)))
		return -EFAULT;
	if (bpf_skb_adjust_room(skb, sizeof(*ip), BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO |
					BPF_F_ADJ_ROOM_ENCAP_L3_IPV6))
		return -ENOMEM;
	*(__be32 *)ip = first;
	ip->payload_len = bpf_htons(skb->len - l2_len - sizeof(*ip));
	ip->nexthdr = IPPROTO_IPV6;
	ip->hop_limit = WRAPPER_TTL;
	__builtin_memcpy(&ip->saddr, to->src, sizeof(ip->saddr));
	__builtin_memcpy(&ip->daddr, to->dst, sizeof(ip->daddr));
	return bpf_skb_store_bytes(skb, l2_len, ip, sizeof(*ip),
				   BPF_F_RECOMPUTE_CSUM);
}

/* Makes a packet the payload of another one, which has the addresses of a key.
 */
GLOBAL int wrap(struct __sk_buff *skb, const struct packet *p,
		const struct flow_key *to)
{
	if (!p || !to)
		return -EINVAL;
	if (set_ttl(skb, p, p->ttl - 1))
		return -EFAULT;
	return p->v6 ? wrap_v6(skb, to) : wrap_v4(skb, to);
}

#endif
