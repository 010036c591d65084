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
	const __u64 *x = (const __u64 *)a, *y = (const __u64 *)b;

	/* Ports first, since they differ most often. */
	return x[4] == y[4] && x[3] == y[3] && x[2] == y[2] && x[1] == y[1] &&
	       x[0] == y[0];
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
