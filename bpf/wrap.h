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
#include "length.h"
#include "nat.h"
#include "packet.h"
#include "wrapper.h"

/* Makes room after the link-layer header. */
static __always_inline long make_room(struct __sk_buff *skb, __u32 len,
				      __u64 l3)
{
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO | l3;

	if (dispatch == DISPATCH_GENEVE)
		flags |= BPF_F_ADJ_ROOM_ENCAP_L4_UDP;
	return bpf_skb_adjust_room(skb, len, BPF_ADJ_ROOM_MAC, flags);
}

/* Writes what follows the outer IP header. */
static __always_inline long put_geneve(struct __sk_buff *skb,
				       const struct packet *p, __u32 offset)
{
	struct wrapper *w = last_wrapper();
	struct geneve *g;

	if (dispatch != DISPATCH_GENEVE)
		return 0;
	if (!w)
		return -EFAULT;
	g = &w->header.geneve;
	make_geneve(g, &p->key, skb->protocol, p->l3_len + sizeof(*g));
	return bpf_skb_store_bytes(skb, offset, g, sizeof(*g),
				   BPF_F_RECOMPUTE_CSUM);
}

static __always_inline long wrap_v4(struct __sk_buff *skb,
				    const struct packet *p,
				    const struct flow_key *to)
{
	const int room = wrapper_len(p, ACTION_DIRECT);
	struct iphdr ip;
	__u8 tos;

	if (bpf_skb_load_bytes(skb, l2_len + offsetof(struct iphdr, tos), &tos,
			       sizeof(tos)))
		return -EFAULT;
	if (make_room(skb, room, BPF_F_ADJ_ROOM_ENCAP_L3_IPV4))
		return -ENOMEM;
	wrapper_v4(&ip, to, tos, p->l3_len + room);
	if (bpf_skb_store_bytes(skb, l2_len, &ip, sizeof(ip), 0))
		return -EFAULT;
	return put_geneve(skb, p, l2_len + sizeof(ip));
}

static __always_inline long wrap_v6(struct __sk_buff *skb,
				    const struct packet *p,
				    const struct flow_key *to)
{
	const int room = wrapper_len(p, ACTION_DIRECT);
	struct wrapper *w = last_wrapper();
	struct ipv6hdr *ip;
	__be32 first;

	if (!w)
		return -EFAULT;
	ip = &w->header.v6;
	if (bpf_skb_load_bytes(skb, l2_len, &first, sizeof(first)))
		return -EFAULT;
	if (make_room(skb, room, BPF_F_ADJ_ROOM_ENCAP_L3_IPV6))
		return -ENOMEM;
	wrapper_v6(ip, to, first, p->l3_len + room);
	if (bpf_skb_store_bytes(skb, l2_len, ip, sizeof(*ip),
				BPF_F_RECOMPUTE_CSUM))
		return -EFAULT;
	return put_geneve(skb, p, l2_len + sizeof(*ip));
}

/* Makes a packet the payload of another one, which has the addresses of a key.
 * Padding of the frame is no payload. */
GLOBAL int wrap(struct __sk_buff *skb, const struct packet *p,
		const struct flow_key *to)
{
	if (!p || !to)
		return -EINVAL;
	if (set_ttl(skb, p, p->ttl - 1))
		return -EFAULT;
	return p->v6 ? wrap_v6(skb, p, to) : wrap_v4(skb, p, to);
}

#endif
