/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_PARSE_H
#define TANDEM_PARSE_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "context.h"
#include "packet.h"

/* IPv6 extension headers that are parsed; packets with more pass unchanged. */
#define MAX_EXTENSIONS 6

#define IP_MF 0x2000
#define IP_OFFSET 0x1fff

enum parsed {
	UNDERSTOOD,
	FOREIGN, /* another protocol */
	BROKEN,	 /* truncated headers, wrong lengths and the like */
};

static __always_inline bool parse_ports(struct __sk_buff *skb, struct packet *p)
{
	__u32 room = p->l3_len - (p->l4 - p->l3);
	struct tcphdr tcp;
	__u8 icmp[2];
	__be32 ports;

	/* Padding of the frame is no header. */
	if (room <
	    (p->key.proto == IPPROTO_TCP ? sizeof(tcp) : sizeof(struct udphdr)))
		return false;
	switch (p->key.proto) {
	case IPPROTO_TCP:
		if (!load(skb, p->l4, &tcp, sizeof(tcp)))
			return false;
		p->key.sport = tcp.source;
		p->key.dport = tcp.dest;
		p->tcp_flags = ((__u8 *)&tcp)[13];
		p->l4_len = tcp.doff * 4;
		/* Options may continue in the next fragment. */
		return p->l4_len >= sizeof(tcp) &&
		       (p->l4_len <= room || p->fragment != WHOLE);
	case IPPROTO_UDP:
		if (!load(skb, p->l4, &ports, sizeof(ports)))
			return false;
		p->key.sport = ((__be16 *)&ports)[0];
		p->key.dport = ((__be16 *)&ports)[1];
		return true;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		if (bpf_skb_load_bytes(skb, p->l4, icmp, sizeof(icmp)))
			return false;
		p->key.sport = icmp[0];
		p->key.dport = icmp[1];
		return true;
	}
	return false;
}

static __always_inline enum parsed parse_v4(struct __sk_buff *skb,
					    struct packet *p)
{
	struct iphdr ip;
	__u16 offset;

	if (!load(skb, p->l3, &ip, sizeof(ip)))
		return BROKEN;
	if (ip.version != 4 || ip.ihl < 5)
		return BROKEN;
	if (ip.protocol != IPPROTO_TCP && ip.protocol != IPPROTO_UDP &&
	    ip.protocol != IPPROTO_ICMP)
		return FOREIGN;
	set_v4(p->key.src, ip.saddr);
	set_v4(p->key.dst, ip.daddr);
	p->key.proto = ip.protocol;
	p->l3_len = bpf_ntohs(ip.tot_len);
	p->l4 = p->l3 + ip.ihl * 4;
	p->ttl = ip.ttl;
	p->l3_check = ip.check;
	offset = bpf_ntohs(ip.frag_off);
	if (offset & (IP_MF | IP_OFFSET)) {
		p->fragment =
			offset & IP_OFFSET ? LATER_FRAGMENT : FIRST_FRAGMENT;
		p->frag_id = ip.id;
	}
	return UNDERSTOOD;
}

static __always_inline enum parsed parse_v6(struct __sk_buff *skb,
					    struct packet *p)
{
	struct ipv6hdr ip;
	__u8 next, head[8];

	if (!load(skb, p->l3, &ip, sizeof(ip)))
		return BROKEN;
	if (ip.version != 6)
		return BROKEN;
	__builtin_memcpy(p->key.src, &ip.saddr, sizeof(p->key.src));
	__builtin_memcpy(p->key.dst, &ip.daddr, sizeof(p->key.dst));
	/* Invalid on the wire; here they would be taken for IPv4. */
	if (is_v4(p->key.src) || is_v4(p->key.dst))
		return BROKEN;
	p->v6 = true;
	p->l3_len = sizeof(ip) + bpf_ntohs(ip.payload_len);
	p->ttl = ip.hop_limit;
	p->l4 = p->l3 + sizeof(ip);
	next = ip.nexthdr;
#pragma clang loop unroll(full)
	for (int i = 0; i <= MAX_EXTENSIONS; i++) {
		switch (next) {
		case IPPROTO_TCP:
		case IPPROTO_UDP:
		case IPPROTO_ICMPV6:
			p->key.proto = next;
			return UNDERSTOOD;
		case IPPROTO_HOPOPTS:
		case IPPROTO_ROUTING:
		case IPPROTO_DSTOPTS:
		case IPPROTO_FRAGMENT:
		case IPPROTO_AH:
			break;
		default:
			return FOREIGN;
		}
		if (i == MAX_EXTENSIONS ||
		    bpf_skb_load_bytes(skb, p->l4, head, sizeof(head)))
			return BROKEN;
		if (next == IPPROTO_FRAGMENT) {
			__u16 offset = head[2] << 8 | head[3];

			if (offset & ~7)
				p->fragment = LATER_FRAGMENT;
			else if (offset & 1)
				p->fragment = FIRST_FRAGMENT;
			__builtin_memcpy(&p->frag_id, &head[4],
					 sizeof(p->frag_id));
			p->l4 += sizeof(head);
			if (p->fragment == LATER_FRAGMENT) {
				/* Further headers are in the first fragment. */
				p->key.proto = head[0];
				return UNDERSTOOD;
			}
		} else if (next == IPPROTO_AH) {
			p->l4 += (head[1] + 2) * 4;
		} else {
			p->l4 += (head[1] + 1) * 8;
		}
		next = head[0];
	}
	return BROKEN;
}

/* Parses addresses and ports, from p->l3 on. */
static __always_inline enum parsed parse(struct __sk_buff *skb,
					 __be16 ethertype, struct packet *p)
{
	enum parsed parsed = FOREIGN;

	if (ethertype == bpf_htons(ETH_P_IP))
		parsed = parse_v4(skb, p);
	else if (ethertype == bpf_htons(ETH_P_IPV6))
		parsed = parse_v6(skb, p);
	if (parsed != UNDERSTOOD)
		return parsed;
	/* GSO packets may be longer than the length field can say. */
	if (skb->gso_size)
		p->l3_len = skb->len - p->l3;
	else if (p->l3_len > skb->len - p->l3)
		return BROKEN;
	if (p->l4 - p->l3 > p->l3_len)
		return BROKEN;
	if (p->fragment != LATER_FRAGMENT && !parse_ports(skb, p))
		return BROKEN;
	return UNDERSTOOD;
}

#endif
