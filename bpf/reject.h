/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_REJECT_H
#define TANDEM_REJECT_H

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "clock.h"
#include "flow.h"
#include "nat.h"
#include "packet.h"
#include "tc_config.h"

#define ANSWER_TTL 64

/* Types and codes, of ICMP and of ICMPv6. */
#define ICMP_ECHOREPLY 0
#define ICMP_DEST_UNREACH 3
#define ICMP_ECHO 8
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETERPROB 12
#define ICMP_PORT_UNREACH 3
#define ICMP_FRAG_NEEDED 4
#define ICMPV6_DEST_UNREACH 1
#define ICMPV6_PKT_TOOBIG 2
#define ICMPV6_TIME_EXCEED 3
#define ICMPV6_PARAMPROB 4
#define ICMPV6_PORT_UNREACH 4
#define ICMPV6_ECHO_REQUEST 128
#define ICMPV6_ECHO_REPLY 129

/* As many errors a second as the kernel sends by default (icmp_msgs_per_sec),
 * on each CPU. */
#define ERRORS_PER_SECOND 1000

struct error_budget {
	__u32 second;
	__u32 sent;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct error_budget);
	__uint(max_entries, 1);
} tdm_budget SEC(".maps");

static __always_inline bool may_send_error(void)
{
	const __u32 zero = 0;
	struct error_budget *b = bpf_map_lookup_elem(&tdm_budget, &zero);
	__u32 now = now_s();

	if (!b)
		return false;
	if (b->second != now) {
		b->second = now;
		b->sent = 0;
	}
	return b->sent++ < ERRORS_PER_SECOND;
}

/* Sends what the packet has become to where it came from. */
static __always_inline int bounce(struct __sk_buff *skb)
{
	__u8 mac[2][6], swapped[2][6];

	if (l2_len) {
		if (bpf_skb_load_bytes(skb, 0, mac, sizeof(mac)))
			return TC_ACT_SHOT;
		__builtin_memcpy(swapped[0], mac[1], sizeof(mac[1]));
		__builtin_memcpy(swapped[1], mac[0], sizeof(mac[0]));
		if (bpf_skb_store_bytes(skb, 0, swapped, sizeof(swapped), 0))
			return TC_ACT_SHOT;
	}
	return bpf_redirect(skb->ifindex, 0);
}

/* Sets the length behind the IP header, and a fresh hop limit. */
static __always_inline long set_ip(struct __sk_buff *skb,
				   const struct packet *p, __u16 length)
{
	__be16 ttl[2], len[2];
	__u8 hops = ANSWER_TTL;
	long err;

	if (p->v6) {
		len[1] = bpf_htons(length - sizeof(struct ipv6hdr));
		return bpf_skb_store_bytes(
			       skb,
			       p->l3 + offsetof(struct ipv6hdr, payload_len),
			       &len[1], sizeof(len[1]), 0) |
		       bpf_skb_store_bytes(
			       skb, p->l3 + offsetof(struct ipv6hdr, hop_limit),
			       &hops, sizeof(hops), 0);
	}
	if (bpf_skb_load_bytes(skb, p->l3 + offsetof(struct iphdr, tot_len),
			       &len[0], sizeof(len[0])))
		return -1;
	len[1] = bpf_htons(length);
	ttl[0] = bpf_htons(p->ttl << 8 | p->key.proto);
	ttl[1] = bpf_htons(ANSWER_TTL << 8 | p->key.proto);
	err = bpf_l3_csum_replace(skb, p->l3 + offsetof(struct iphdr, check),
				  len[0], len[1], 2);
	err |= bpf_l3_csum_replace(skb, p->l3 + offsetof(struct iphdr, check),
				   ttl[0], ttl[1], 2);
	err |= bpf_skb_store_bytes(skb, p->l3 + offsetof(struct iphdr, tot_len),
				   &len[1], sizeof(len[1]), 0);
	return err |
	       bpf_skb_store_bytes(skb, p->l3 + offsetof(struct iphdr, ttl),
				   &hops, sizeof(hops), 0);
}

/*
 * Makes a reset of a segment (RFC 9293, 3.10.7.1). The checksum is corrected
 * rather than made anew, as it may be left to the device. So a payload stays
 * where it is: its sum cannot be taken out. Options go if there is none.
 */
GLOBAL int reject_tcp(struct __sk_buff *skb, struct packet *p)
{
	struct tcphdr old, new = {};
	__u32 check, payload, length, options;
	__u8 option[40] = {};
	__s64 diff;
	long err;

	/* What a fragment is part of is not known, and its answer would be one.
	 */
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
		/* Said to the verifier. */
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
	return err ? TC_ACT_SHOT : bounce(skb);
}

/* What of the IP header and its extensions fits into an error of ours. */
#define QUOTE_MAX 96

struct icmp_error {
	__u8 type;
	__u8 code;
	__be16 check;
	__be32 info;
};

/* The packet's beginning, as an error quotes it: 8 bytes behind the IP header,
 * or those of TCP, whose checksum may have to be filled in yet. */
static __always_inline __u32 quote_len(const struct packet *p)
{
	return p->l4 - p->l3 + (p->key.proto == IPPROTO_TCP ? 20 : 8);
}

/*
 * Makes an ICMP error of a packet, from the address it was sent to. info is
 * the second word of the ICMP header.
 */
GLOBAL int icmp_error(struct __sk_buff *skb, struct packet *p, __u8 type,
		      __u8 code, __u32 info)
{
	__u8 quote[QUOTE_MAX] = {};
	struct icmp_error icmp = {
		.type = type,
		.code = code,
		.info = bpf_htonl(info),
	};
	__u32 len, head;
	__u64 sum;

	if (!p || !may_send_error())
		return TC_ACT_SHOT;
	len = quote_len(p);
	if (len > QUOTE_MAX || len < 28 || p->l3_len < len ||
	    bpf_skb_load_bytes(skb, p->l3, quote, len) ||
	    bpf_skb_change_tail(skb, p->l3 + len, 0))
		return TC_ACT_SHOT;
	head = (p->v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) +
	       sizeof(icmp);
	if (bpf_skb_adjust_room(skb, head, BPF_ADJ_ROOM_MAC, 0))
		return TC_ACT_SHOT;
	sum = bpf_csum_diff(NULL, 0, (__be32 *)quote, sizeof(quote), 0);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&icmp, sizeof(icmp), sum);
	if (p->v6) {
		struct ipv6hdr ip = {
			.version = 6,
			.payload_len = bpf_htons(len + sizeof(icmp)),
			.nexthdr = IPPROTO_ICMPV6,
			.hop_limit = ANSWER_TTL,
		};

		__builtin_memcpy(&ip.saddr, p->key.dst, 16);
		__builtin_memcpy(&ip.daddr, p->key.src, 16);
		sum = bpf_csum_diff(NULL, 0, (__be32 *)&ip.saddr, 32, sum);
		sum += bpf_htons(len + sizeof(icmp));
		sum += bpf_htons(IPPROTO_ICMPV6);
		if (bpf_skb_store_bytes(skb, p->l3, &ip, sizeof(ip), 0))
			return TC_ACT_SHOT;
	} else {
		struct iphdr ip = {
			.version = 4,
			.ihl = 5,
			.tot_len = bpf_htons(len + head),
			.ttl = ANSWER_TTL,
			.protocol = IPPROTO_ICMP,
			.saddr = p->key.dst[3],
			.daddr = p->key.src[3],
		};

		ip.check = ~fold(
			bpf_csum_diff(NULL, 0, (__be32 *)&ip, sizeof(ip), 0));
		if (bpf_skb_store_bytes(skb, p->l3, &ip, sizeof(ip), 0))
			return TC_ACT_SHOT;
	}
	icmp.check = ~fold(sum);
	if (bpf_skb_store_bytes(skb, p->l3 + head - sizeof(icmp), &icmp,
				sizeof(icmp), 0))
		return TC_ACT_SHOT;
	return bounce(skb);
}

static __always_inline int reject(struct __sk_buff *skb, struct packet *p)
{
	if (p->key.proto == IPPROTO_TCP)
		return reject_tcp(skb, p);
	if (p->v6)
		return icmp_error(skb, p, ICMPV6_DEST_UNREACH,
				  ICMPV6_PORT_UNREACH, 0);
	return icmp_error(skb, p, ICMP_DEST_UNREACH, ICMP_PORT_UNREACH, 0);
}

#endif
