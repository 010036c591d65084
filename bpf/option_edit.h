/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_OPTION_EDIT_H
#define TANDEM_OPTION_EDIT_H

#include <linux/bpf.h>
#include <linux/errno.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "context.h"
#include "csum.h"
#include "global.h"
#include "icmp.h"
#include "option.h"
#include "packet.h"
#include "wrapper.h"

/* Makes room after the fixed IP header, or removes what is there. Checksums of
 * TCP and UDP stay as they are. */
static __always_inline long resize(struct __sk_buff *skb, __s32 len)
{
	return bpf_skb_adjust_room(skb, len, BPF_ADJ_ROOM_NET,
				   BPF_F_ADJ_ROOM_FIXED_GSO |
					   BPF_F_ADJ_ROOM_NO_CSUM_RESET);
}

static __always_inline long
add_option_v4(struct __sk_buff *skb, const struct packet *p, struct wrapper *w)
{
	struct option_v4 *o = &w->header.option4;
	struct iphdr *ip = &w->header.v4;
	const int len = sizeof(*o);

	if (!load(skb, p->l3, ip, sizeof(*ip)) ||
	    ip->ihl + len / 4 > IP_MAX_WORDS)
		return -EINVAL;
	lengthen_v4(ip, o, p);
	if (resize(skb, len))
		return -ENOMEM;
	return bpf_skb_store_bytes(skb, p->l3, ip, sizeof(*ip), 0) |
	       bpf_skb_store_bytes(skb, p->l3 + sizeof(*ip), o, sizeof(*o), 0);
}

static __always_inline long
add_option_v6(struct __sk_buff *skb, const struct packet *p, struct wrapper *w)
{
	struct option_v6 *o = &w->header.option6;
	struct ipv6hdr *ip = &w->header.v6;

	/* Options for each hop have to be the first. */
	if (!load(skb, p->l3, ip, sizeof(*ip)) ||
	    ip->nexthdr == IPPROTO_HOPOPTS)
		return -EINVAL;
	lengthen_v6(ip, o, p);
	if (resize(skb, sizeof(*o)))
		return -ENOMEM;
	return bpf_skb_store_bytes(skb, p->l3, ip, sizeof(*ip),
				   BPF_F_RECOMPUTE_CSUM) |
	       bpf_skb_store_bytes(skb, p->l3 + sizeof(*ip), o, sizeof(*o),
				   BPF_F_RECOMPUTE_CSUM);
}

/* Adds an option with the destination that a packet came with. */
GLOBAL int add_option(struct __sk_buff *skb, const struct packet *p)
{
	struct wrapper *w = last_wrapper();

	if (!p || !w)
		return -EINVAL;
	return p->v6 ? add_option_v6(skb, p, w) : add_option_v4(skb, p, w);
}

/* Whether a packet has an option of this kind. Then the headers are in
 * last_wrapper(), and the destination that the packet came with is in inner. */
static __always_inline bool
read_option(struct __sk_buff *skb, const struct packet *p, struct wrapper *w)
{
	struct packet *inner = &w->inner;
	__be16 port;

	*inner = *p;
	if (p->v6) {
		const struct option_v6 *o = &w->header.option6;
		const struct ipv6hdr *ip = &w->header.v6;

		if (p->l4 - p->l3 < sizeof(*ip) + sizeof(*o) ||
		    !load(skb, p->l3, &w->header.v6, sizeof(*ip)) ||
		    ip->nexthdr != IPPROTO_DSTOPTS ||
		    !load(skb, p->l3 + sizeof(*ip), &w->header.option6,
			  sizeof(*o)) ||
		    o->units != OPTION_V6_UNITS || o->type != OPTION_V6 ||
		    o->len != OPTION_V6_LEN || is_v4(o->addr))
			return false;
		copy_addr(inner->key.dst, o->addr);
		port = o->port;
	} else {
		const struct option_v4 *o = &w->header.option4;

		if (p->l4 - p->l3 < sizeof(struct iphdr) + sizeof(*o) ||
		    !load(skb, p->l3, &w->header.v4, sizeof(struct iphdr)) ||
		    !load(skb, p->l3 + sizeof(struct iphdr), &w->header.option4,
			  sizeof(*o)) ||
		    o->type != OPTION_V4 || o->len != sizeof(*o))
			return false;
		inner->key.dst[3] = __builtin_bswap32(o->addr);
		port = __builtin_bswap16(o->port);
	}
	if (!is_icmp(p))
		inner->key.dport = port;
	return true;
}

static __always_inline long remove_option_v4(struct __sk_buff *skb,
					     const struct packet *p,
					     struct wrapper *w)
{
	struct option_v4 *o = &w->header.option4;
	struct iphdr *ip = &w->header.v4;
	const int len = sizeof(*o);
	const __u32 *words = (const __u32 *)o;

	resize_v4(ip, p->l3_len - len, -len / 4,
		  (__u64)(__u32)~words[0] + (__u32)~words[1]);
	if (resize(skb, -len))
		return -ENOMEM;
	return bpf_skb_store_bytes(skb, p->l3, ip, sizeof(*ip),
				   BPF_F_RECOMPUTE_CSUM);
}

static __always_inline long remove_option_v6(struct __sk_buff *skb,
					     const struct packet *p,
					     struct wrapper *w)
{
	struct ipv6hdr *ip = &w->header.v6;
	const int len = sizeof(struct option_v6);

	ip->nexthdr = w->header.option6.next;
	ip->payload_len = length_field(p->l3_len - len - sizeof(*ip));
	if (resize(skb, -len))
		return -ENOMEM;
	return bpf_skb_store_bytes(skb, p->l3, ip, sizeof(*ip),
				   BPF_F_RECOMPUTE_CSUM);
}

/* Removes the option that was read. */
GLOBAL int remove_option(struct __sk_buff *skb, struct packet *p)
{
	struct wrapper *w = last_wrapper();
	__u16 len;
	long err;

	if (!p || !w)
		return -EINVAL;
	err = p->v6 ? remove_option_v6(skb, p, w) : remove_option_v4(skb, p, w);
	len = p->v6 ? sizeof(struct option_v6) : sizeof(struct option_v4);
	p->l4 -= len;
	p->l3_len -= len;
	p->l3_check = w->header.v4.check;
	return err;
}

#endif
