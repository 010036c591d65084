/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_WRAP_H
#define TANDEM_WRAP_H

#include <linux/bpf.h>
#include <linux/errno.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <stddef.h>
#include <bpf/bpf_helpers.h>

#include "global.h"
#include "nat.h"
#include "packet.h"
#include "wrapper.h"

static __always_inline long wrap_v4(struct __sk_buff *skb,
				    const struct flow_key *to)
{
	struct iphdr ip;
	__u8 tos;

	if (bpf_skb_load_bytes(skb, l2_len + offsetof(struct iphdr, tos), &tos,
			       sizeof(tos)))
		return -EFAULT;
	if (bpf_skb_adjust_room(skb, sizeof(ip), BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO |
					BPF_F_ADJ_ROOM_ENCAP_L3_IPV4))
		return -ENOMEM;
	wrapper_v4(&ip, to, tos, skb->len - l2_len);
	return bpf_skb_store_bytes(skb, l2_len, &ip, sizeof(ip), 0);
}

static __always_inline long wrap_v6(struct __sk_buff *skb,
				    const struct flow_key *to)
{
	struct wrapper *w = last_wrapper();
	struct ipv6hdr *ip;
	__be32 first;

	if (!w)
		return -EFAULT;
	ip = &w->header.v6;
	if (bpf_skb_load_bytes(skb, l2_len, &first, sizeof(first)))
		return -EFAULT;
	if (bpf_skb_adjust_room(skb, sizeof(*ip), BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO |
					BPF_F_ADJ_ROOM_ENCAP_L3_IPV6))
		return -ENOMEM;
	wrapper_v6(ip, to, first, skb->len - l2_len);
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
