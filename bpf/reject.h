/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_REJECT_H
#define TANDEM_REJECT_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <bpf/bpf_helpers.h>

#include "icmp.h"
#include "icmp_error.h"
#include "packet.h"
#include "tcp_reset.h"

/* Turns a packet into its rejection: a reset, or port unreachable. */
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
