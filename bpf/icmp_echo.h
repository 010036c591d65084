/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_ICMP_ECHO_H
#define TANDEM_ICMP_ECHO_H

#include <linux/bpf.h>
#include <linux/errno.h>
#include <linux/pkt_cls.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "answer.h"
#include "context.h"
#include "csum.h"
#include "flow_key.h"
#include "global.h"
#include "icmp.h"
#include "nat.h"
#include "packet.h"

/* Turns an echo request to a Service address, which no device has, into its
 * reply. */
GLOBAL int answer_echo(struct __sk_buff *skb, struct packet *p)
{
	__be16 old, new;
	struct flow_key to;
	__u8 type;
	long err;

	if (!p)
		return TC_ACT_SHOT;
	/* Type and code are one word for the checksum. */
	type = p->v6 ? ICMPV6_ECHO_REPLY : ICMP_ECHOREPLY;
	old = bpf_htons((p->key.sport & 0xff) << 8 | (p->key.dport & 0xff));
	new = bpf_htons(type << 8 | (p->key.dport & 0xff));
	err = bpf_l4_csum_replace(skb, p->l4 + csum_offset(p->key.proto), old,
				  new, sizeof(new));
	err |= bpf_skb_store_bytes(skb, p->l4, &new, sizeof(new), 0);
	turn_around(&to, &p->key);
	to.sport = p->key.sport;
	to.dport = p->key.dport;
	err |= rewrite_fields(skb, p, &to);
	err |= set_ip(skb, p, p->l3_len);
	return err ? TC_ACT_SHOT : bounce(skb, p);
}

/* Inverts the sequence number of an echo request. */
static __always_inline long mark_echo(struct __sk_buff *skb,
				      const struct packet *p)
{
	const __u32 at = p->l4 + offsetof(struct icmp_echo, sequence);
	__be16 old, new;

	if (!load(skb, at, &old, sizeof(old)))
		return -EFAULT;
	new = ~old;
	return bpf_l4_csum_replace(skb, p->l4 + csum_offset(p->key.proto), old,
				   new, sizeof(new)) |
	       bpf_skb_store_bytes(skb, at, &new, sizeof(new), 0);
}

#endif
