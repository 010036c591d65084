/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_ICMP_H
#define TANDEM_ICMP_H

#include <linux/types.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <stdbool.h>

#include "packet.h"

/* Types and codes, of ICMP and of ICMPv6. */
#define ICMP_ECHOREPLY 0
#define ICMP_DEST_UNREACH 3
#define ICMP_ECHO 8
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETERPROB 12
#define ICMP_NET_UNREACH 0
#define ICMP_HOST_UNREACH 1
#define ICMP_PORT_UNREACH 3
#define ICMP_FRAG_NEEDED 4
#define ICMPV6_DEST_UNREACH 1
#define ICMPV6_PKT_TOOBIG 2
#define ICMPV6_TIME_EXCEED 3
#define ICMPV6_PARAMPROB 4
#define ICMPV6_NO_ROUTE 0
#define ICMPV6_ADDR_UNREACH 3
#define ICMPV6_PORT_UNREACH 4
#define ICMPV6_ECHO_REQUEST 128
#define ICMPV6_ECHO_REPLY 129

struct icmp_echo {
	__u8 type;
	__u8 code;
	__be16 check;
	__be16 id;
	__be16 sequence;
};

struct icmp_error {
	__u8 type;
	__u8 code;
	__be16 check;
	__be32 info;
};

static __always_inline bool is_icmp(const struct packet *p)
{
	return p->key.proto == IPPROTO_ICMP || p->key.proto == IPPROTO_ICMPV6;
}

/* Errors quote the packet that caused them. */
static __always_inline bool is_icmp_error(const struct packet *p)
{
	__u8 type = p->key.sport & 0xff;

	if (p->v6)
		return type >= ICMPV6_DEST_UNREACH && type <= ICMPV6_PARAMPROB;
	return type == ICMP_DEST_UNREACH || type == ICMP_TIME_EXCEEDED ||
	       type == ICMP_PARAMETERPROB;
}

static __always_inline bool is_echo_request(const struct packet *p)
{
	__u8 type = p->key.sport & 0xff;

	return p->fragment == WHOLE &&
	       type == (p->v6 ? ICMPV6_ECHO_REQUEST : ICMP_ECHO);
}

#endif
