/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_OPTION_H
#define TANDEM_OPTION_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/types.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>

#include "addr.h"
#include "btf_emit.h"
#include "clock.h"
#include "csum.h"
#include "flow_index.h"
#include "icmp.h"
#include "packet.h"

/*
 * What tells the frontend of a packet that was translated to its backend: an IP
 * option, right after the fixed header. The format is that of Cilium's dispatch
 * "opt" on little-endian nodes.
 *
 * IPv4, 8 bytes:
 *  0  type 0x9a: copied into fragments, class control, number 26
 *  1  length: 8
 *  2  port, the lower byte first
 *  4  address, the last byte first
 *
 * IPv6, a destination options header of 24 bytes:
 *  0  next header
 *  1  length in units of 8 bytes, without the first: 2
 *  2  type 0x1b: skipped where it is unknown, not changed on the way
 *  3  length of what follows: 20
 *  4  address
 * 20  port, network byte order
 * 22  0
 */
struct option_v4 {
	__u8 type;
	__u8 len;
	__u16 port;
	__u32 addr;
};

struct option_v6 {
	__u8 next;
	__u8 units;
	__u8 type;
	__u8 len;
	__be32 addr[4];
	__be16 port;
	__u16 pad;
};

_Static_assert(sizeof(struct option_v4) == 8, "option_v4");
_Static_assert(sizeof(struct option_v6) == 24, "option_v6");

#define IP_MAX_WORDS 15 /* of an IPv4 header with options */

enum option_number {
	OPTION_V4 = 0x9a,
	OPTION_V6 = 0x1b,
	OPTION_V6_UNITS = 2,
	OPTION_V6_LEN = 20,
	/* Seconds after which the next segment of a connection has the option
	 * again, in case that the backend's node has lost its flow. A client
	 * that gets no answer retransmits at growing intervals, so they exceed
	 * this soon. */
	OPTION_AFTER_S = 5,
};
BTF_EMIT(option_number);

/* Whether a packet of a flow has to have the option. Of TCP, those that begin a
 * connection do, or may: the backend's node has a flow for all others, by which
 * it knows them. Of UDP that would take two lookups more for each. Fragments
 * have no ports to know them by. */
static __always_inline bool needs_option(const struct packet *p,
					 const struct flow_hit *hit)
{
	return p->key.proto != IPPROTO_TCP || p->fragment != WHOLE ||
	       p->tcp_flags & TCP_SYN || now_s() - hit->seen >= OPTION_AFTER_S;
}

/* The length field of an IP header: 0 for a packet that is still to be
 * segmented, and longer than the field can say. */
static __always_inline __be16 length_field(__u32 len)
{
	return len > 0xffff ? 0 : bpf_htons(len);
}

/* Corrects an IPv4 header for a packet's new length and options that are some
 * words longer; sum is that of the words. */
static __always_inline void resize_v4(struct iphdr *ip, __u32 len, int words,
				      __u64 sum)
{
	sum += (__u64)(__u16)~ip->check + (__u32) ~*(__be32 *)ip;
	ip->ihl += words;
	ip->tot_len = length_field(len);
	ip->check = ~fold(sum + *(__be32 *)ip);
}

/* The port in an option: that of the destination. */
static __always_inline __be16 option_port(const struct packet *p)
{
	return is_icmp(p) ? 0 : p->key.dport;
}

/* Makes an option with the destination that a packet came with, and corrects
 * the packet's IPv4 header for it. */
static __always_inline void lengthen_v4(struct iphdr *ip, struct option_v4 *o,
					const struct packet *p)
{
	const __u32 *words = (const __u32 *)o;
	const int len = sizeof(*o);

	o->type = OPTION_V4;
	o->len = len;
	o->port = __builtin_bswap16(option_port(p));
	o->addr = __builtin_bswap32(p->key.dst[3]);
	resize_v4(ip, p->l3_len + len, len / 4, (__u64)words[0] + words[1]);
}

/* Likewise of IPv6. */
static __always_inline void lengthen_v6(struct ipv6hdr *ip, struct option_v6 *o,
					const struct packet *p)
{
	o->next = ip->nexthdr;
	o->units = OPTION_V6_UNITS;
	o->type = OPTION_V6;
	o->len = OPTION_V6_LEN;
	copy_addr(o->addr, p->key.dst);
	o->port = option_port(p);
	o->pad = 0;
	ip->nexthdr = IPPROTO_DSTOPTS;
	ip->payload_len = length_field(p->l3_len + sizeof(*o) - sizeof(*ip));
}

#endif
