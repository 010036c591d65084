/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_KEY_H
#define TANDEM_FLOW_KEY_H

#include <linux/types.h>
#include <stdbool.h>

#include "addr.h"
#include "flow_types.h"

static __always_inline bool same_key(const struct flow_key *a,
				     const struct flow_key *b)
{
	return same_addr(a->src, b->src) && same_addr(a->dst, b->dst) &&
	       a->sport == b->sport && a->dport == b->dport &&
	       a->proto == b->proto;
}

/* The key of packets in the other direction. */
static __always_inline void turn_around(struct flow_key *to,
					const struct flow_key *from)
{
	copy_addr(to->src, from->dst);
	copy_addr(to->dst, from->src);
	to->sport = from->dport;
	to->dport = from->sport;
	to->proto = from->proto;
	to->pad[0] = to->pad[1] = to->pad[2] = 0;
}

#endif
