/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_NAT_H
#define TANDEM_NAT_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_helpers.h>

#include "csum.h"
#include "packet.h"

struct v4_tail {
	__be16 check;
	__be32 addrs[2];
} __attribute__((packed));

/*
 * Rewrites addresses and ports, and corrects the checksums, including partial
 * checksums that the device completes and those of packets that are still to be
 * segmented.
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

#endif
