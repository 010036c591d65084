/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_TCP_RESET_H
#define TANDEM_TCP_RESET_H

#include <linux/bpf.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "answer.h"
#include "global.h"
#include "packet.h"

/*
 * Turns a segment into its reset (RFC 9293, 3.10.7.1). The checksum is
 * corrected rather than computed, as it may be left to the device. So a payload
 * has to stay, since its sum cannot be subtracted. Options are removed if there
 * is no payload.
 */
GLOBAL int reject_tcp(struct __sk_buff *skb, struct packet *p)
{
	struct tcphdr old, new = {};
	__u32 check, payload, length, options;
	__u8 option[40] = {};
	__s64 diff;
	long err;

	/* A fragment is not the whole segment, and a reset of it would be a
	 * fragment too. */
	if (!p || p->tcp_flags & TCP_RST || skb->gso_segs > 1 ||
	    p->fragment != WHOLE)
		return TC_ACT_SHOT;
	check = p->l4 + offsetof(struct tcphdr, check);
	if (bpf_skb_load_bytes(skb, p->l4, &old, sizeof(old)))
		return TC_ACT_SHOT;
	options = old.doff * 4 - sizeof(old);
	length = p->l4 - p->l3 + old.doff * 4;
	if (old.doff < 5 || p->l3_len < length)
		return TC_ACT_SHOT;
	payload = p->l3_len - length;

	new.source = old.dest;
	new.dest = old.source;
	new.doff = old.doff;
	new.check = old.check;
	new.rst = 1;
	if (old.ack) {
		new.seq = old.ack_seq;
	} else {
		new.ack = 1;
		new.ack_seq = bpf_htonl(bpf_ntohl(old.seq) + payload + old.syn +
					old.fin);
	}
	err = 0;
	if (!payload && options) {
		new.doff = 5;
		/* Bounds it for the verifier. */
		options &= 0x3f;
		if (options > sizeof(option))
			return TC_ACT_SHOT;
		/* Linux 6.1 learns nothing from "not 0", and the compiler
		 * makes that of any other test that it understands. */
		asm volatile("" : "+r"(options));
		if (options >= 4 && bpf_skb_load_bytes(skb, p->l4 + sizeof(old),
						       option, options))
			return TC_ACT_SHOT;
		diff = bpf_csum_diff((__be32 *)option, sizeof(option), NULL, 0,
				     0);
		err |= bpf_l4_csum_replace(skb, check, 0, diff, 0);
		err |= bpf_l4_csum_replace(
			skb, check, bpf_htons(sizeof(old) + options),
			bpf_htons(sizeof(old)), BPF_F_PSEUDO_HDR | 2);
		err |= bpf_skb_change_tail(skb, p->l4 + sizeof(old), 0);
		length -= options;
	}
	err |= bpf_skb_load_bytes(skb, check, &new.check, sizeof(new.check));
	old.check = new.check;
	diff = bpf_csum_diff((__be32 *)&old, sizeof(old), (__be32 *)&new,
			     sizeof(new), 0);
	err |= bpf_skb_store_bytes(skb, p->l4, &new, sizeof(new), 0);
	err |= bpf_l4_csum_replace(skb, check, 0, diff, 0);
	err |= set_ip(skb, p, length + payload);
	/* Addresses that change places leave the checksums as they are. */
	if (p->v6) {
		err |= bpf_skb_store_bytes(
			skb, p->l3 + offsetof(struct ipv6hdr, saddr),
			p->key.dst, 16, 0);
		err |= bpf_skb_store_bytes(
			skb, p->l3 + offsetof(struct ipv6hdr, daddr),
			p->key.src, 16, 0);
	} else {
		err |= bpf_skb_store_bytes(
			skb, p->l3 + offsetof(struct iphdr, saddr),
			&p->key.dst[3], 4, 0);
		err |= bpf_skb_store_bytes(
			skb, p->l3 + offsetof(struct iphdr, daddr),
			&p->key.src[3], 4, 0);
	}
	return err ? TC_ACT_SHOT : bounce(skb, p);
}

#endif
