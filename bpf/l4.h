/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_L4_H
#define TANDEM_L4_H

#include <linux/in.h>
#include <linux/types.h>
#include <stdbool.h>

#include "csum.h"
#include "flow_types.h"

/* Headers from the ports to the checksum, in bytes. */
#define TCP_PART 18
#define UDP_PART 8

/* Replaces ports and the checksum. addrs is the difference that the addresses
 * make to a sum. */
static __always_inline void rewrite_l4(__u8 *l4, const struct flow_key *to,
				       __s64 addrs, bool udp, bool partial)
{
	__sum16 *check = (__sum16 *)(l4 + (udp ? 6 : 16));
	__be16 *ports = (__be16 *)l4;
	__u64 ports_diff;

	ports_diff = (__u64)(__u16)~ports[0] + (__u16)~ports[1] + to->sport +
		     to->dport;
	ports[0] = to->sport;
	ports[1] = to->dport;
	if (udp && !*check)
		return;
	/* A partial checksum is the sum of the addresses alone. */
	if (partial)
		*check = fold((__u64)*check + addrs);
	else
		*check = ~fold((__u64)(__u16) ~*check + addrs + ports_diff);
	if (udp && !*check)
		*check = 0xffff;
}

#endif
