/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_ICMP_QUOTE_H
#define TANDEM_ICMP_QUOTE_H

#include <linux/bpf.h>
#include <linux/errno.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "csum.h"
#include "flow_index.h"
#include "flow_key.h"
#include "global.h"
#include "icmp.h"
#include "nat.h"
#include "packet.h"
#include "parse.h"

/* Parses the packet that an error quotes, from an offset on; it may end 8 bytes
 * after its IP header. */
static __always_inline bool parse_quote(struct __sk_buff *skb,
					const struct packet *p, __u32 l3,
					struct packet *inner)
{
	__be32 ports;

	inner->l3 = l3;
	if ((p->v6 ? parse_v6(skb, inner) : parse_v4(skb, inner)) != UNDERSTOOD)
		return false;
	if (inner->key.proto != IPPROTO_TCP && inner->key.proto != IPPROTO_UDP)
		return false;
	if (inner->fragment == LATER_FRAGMENT ||
	    inner->l4 + sizeof(ports) > p->l3 + p->l3_len ||
	    bpf_skb_load_bytes(skb, inner->l4, &ports, sizeof(ports)))
		return false;
	inner->key.sport = ((__be16 *)&ports)[0];
	inner->key.dport = ((__be16 *)&ports)[1];
	return true;
}

/*
 * Translates the quoted packet to what its sender sent. Each change in it also
 * changes the error's checksum, unless it cancels out: IPv4 addresses and the
 * checksum of their header.
 */
GLOBAL int rewrite_quote(struct __sk_buff *skb, const struct packet *p,
			 const struct packet *inner, const struct flow_key *to)
{
	__be16 old_ports[2], new_ports[2];
	__be32 old4[2], new4[2];
	__be16 old_sum, new_sum;
	__s64 addrs, sum;
	__u32 at, check;
	long err = 0;

	if (!p || !inner || !to)
		return -EINVAL;
	old_ports[0] = inner->key.sport;
	old_ports[1] = inner->key.dport;
	new_ports[0] = to->sport;
	new_ports[1] = to->dport;
	at = inner->l4 + csum_offset(inner->key.proto);
	check = p->l4 + csum_offset(p->key.proto);
	if (inner->v6) {
		addrs = bpf_csum_diff((__be32 *)inner->key.src, 32,
				      (__be32 *)to->src, 32, 0);
		err |= bpf_l4_csum_replace(skb, check, 0, addrs, 0);
		err |= bpf_skb_store_bytes(
			skb, inner->l3 + offsetof(struct ipv6hdr, saddr),
			to->src, 32, 0);
	} else {
		old4[0] = inner->key.src[3];
		old4[1] = inner->key.dst[3];
		new4[0] = to->src[3];
		new4[1] = to->dst[3];
		addrs = bpf_csum_diff(old4, sizeof(old4), new4, sizeof(new4),
				      0);
		err |= bpf_l3_csum_replace(
			skb, inner->l3 + offsetof(struct iphdr, check), 0,
			addrs, 0);
		err |= bpf_skb_store_bytes(
			skb, inner->l3 + offsetof(struct iphdr, saddr), new4,
			sizeof(new4), 0);
	}
	err |= bpf_l4_csum_replace(skb, check, *(__u32 *)old_ports,
				   *(__u32 *)new_ports, 4);
	err |= bpf_skb_store_bytes(skb, inner->l4, new_ports, sizeof(new_ports),
				   0);
	/* The quote may end before the checksum, and UDP may have none. */
	if (err || at + sizeof(old_sum) > p->l3 + p->l3_len ||
	    bpf_skb_load_bytes(skb, at, &old_sum, sizeof(old_sum)) ||
	    (!old_sum && inner->key.proto == IPPROTO_UDP))
		return err;
	sum = bpf_csum_diff((__be32 *)old_ports, sizeof(old_ports),
			    (__be32 *)new_ports, sizeof(new_ports), addrs);
	new_sum = ~fold((__u64)(__u16)~old_sum + fold(sum));
	err |= bpf_l4_csum_replace(skb, check, old_sum, new_sum, 2);
	return err | bpf_skb_store_bytes(skb, at, &new_sum, sizeof(new_sum), 0);
}

/*
 * Translates an error about a packet of a flow. The error travels in the
 * direction opposite to the quoted packet, and gets its destination translated
 * accordingly; its source too, if it is the address that the flow translates.
 */
static __always_inline long rewrite_error(struct __sk_buff *skb,
					  struct packet *p,
					  const struct packet *inner,
					  const struct flow_hit *hit)
{
	struct flow_key to;
	long err;

	turn_around(&to, &hit->to);
	err = rewrite_quote(skb, p, inner, &to);
	to = p->key;
	copy_addr(to.dst, hit->to.dst);
	if (!same_addr(hit->to.src, inner->key.dst))
		copy_addr(to.src, hit->to.src);
	err |= rewrite_fields(skb, p, &to);
	p->key = to;
	return err;
}

#endif
