/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_ADDR_H
#define TANDEM_ADDR_H

#include <linux/types.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>

#include "lb_types.h"

#define AF_INET 2
#define AF_INET6 10

/* Addresses have 16 bytes; IPv4 is ::ffff:a.b.c.d. */

static const __be32 v4_prefix = bpf_htonl(0xffff);

static __always_inline bool is_v4(const __be32 *a)
{
	return !a[0] && !a[1] && a[2] == v4_prefix;
}

/* An address that no single host can have, so no answer is sent to it (RFC
 * 1122, 3.2.2). */
static __always_inline bool is_martian(const __be32 *a)
{
	__u32 last = bpf_ntohl(a[3]);

	if (is_v4(a))
		return last >> 24 == 0 || last >> 24 == 127 ||
		       last >> 28 == 0xe || last == 0xffffffff;
	return bpf_ntohl(a[0]) >> 24 == 0xff ||
	       (!a[0] && !a[1] && !a[2] && last <= 1);
}

static __always_inline bool is_loopback(const __be32 *a)
{
	if (is_v4(a))
		return bpf_ntohl(a[3]) >> 24 == 127;
	return !a[0] && !a[1] && !a[2] && a[3] == bpf_htonl(1);
}

static __always_inline bool same_addr(const __be32 *a, const __be32 *b)
{
	return a[3] == b[3] && a[2] == b[2] && a[1] == b[1] && a[0] == b[0];
}

static __always_inline bool is_zero(const __be32 *a)
{
	return !(a[0] | a[1] | a[2] | a[3]);
}

static __always_inline void copy_addr(__be32 *to, const __be32 *from)
{
	to[0] = from[0];
	to[1] = from[1];
	to[2] = from[2];
	to[3] = from[3];
}

static __always_inline void set_v4(__be32 *to, __be32 addr)
{
	to[0] = 0;
	to[1] = 0;
	to[2] = v4_prefix;
	to[3] = addr;
}

static __always_inline bool in_prefix(const struct prefix *p, const __be32 *a)
{
	return !(((a[3] ^ p->addr[3]) & p->mask[3]) |
		 ((a[2] ^ p->addr[2]) & p->mask[2]) |
		 ((a[1] ^ p->addr[1]) & p->mask[1]) |
		 ((a[0] ^ p->addr[0]) & p->mask[0]));
}

#endif
