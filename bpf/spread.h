/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SPREAD_H
#define TANDEM_SPREAD_H

#include <linux/types.h>
#include <stdbool.h>

#include "addr.h"
#include "flow_index.h"
#include "flow_types.h"
#include "geneve.h"
#include "packet.h"
#include "tc_config.h"

/* Whether an address is one of those that nodes send IP in IP from. */
static __always_inline bool is_spread(const __be32 *addr)
{
	const volatile struct spread *s = &spreads[!is_v4(addr)];

	if (!s->hosts[3])
		return false;
#pragma unroll
	for (int i = 0; i < 4; i++)
		if ((addr[i] & ~s->hosts[i]) != s->addr[i])
			return false;
	return true;
}

/* Whether packets of a client are sent from the prefix. */
static __always_inline bool spreads_sources(const struct packet *p)
{
	return dispatch == DISPATCH_IPIP &&
	       spreads[!is_v4(p->key.src)].hosts[3];
}

/* Gives the outer header of a client's packet a source address of the prefix,
 * by a hash of the flow. A flow that is older than that goes on without: the
 * other node may not take packets from there. */
static __always_inline void spread_source(struct flow_hit *hit,
					  const struct packet *p)
{
	const volatile struct spread *s = &spreads[!is_v4(p->key.src)];
	__be32 *src = hit->to.src;
	__u32 hash;

	if (!spreads_sources(p) || !(hit->flags & FLOW_SPREAD))
		return;
	hash = flow_hash(&p->key);
#pragma unroll
	for (int i = 0; i < 4; i++) {
		src[i] = s->addr[i] | (hash & s->hosts[i]);
		hash = hash << 16 | hash >> 16;
	}
}

#endif
