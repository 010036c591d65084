/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_STALE_H
#define TANDEM_FLOW_STALE_H

#include <linux/in.h>
#include <stdbool.h>

#include "backend.h"
#include "flow_index.h"
#include "packet.h"
#include "tc_config.h"

/* Whether a packet starts a new connection in place of its flow, or the flow's
 * backend serves no longer. */
static __always_inline bool is_over(const struct packet *p,
				    const struct flow_hit *hit)
{
	const struct flow *f = hit->flow;

	if (hit->reply)
		return false;
	if (p->key.proto == IPPROTO_TCP) {
		if ((p->tcp_flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
			return false;
		/* The other proxy gets all new connections. */
		if (draining || hit->flags & FLOW_CLOSED)
			return true;
		if (hit->flags & FLOW_ESTABLISHED)
			return false;
	}
	return !backend_of(f->backend, f->backend_generation, f->service);
}

/* Whether a packet is a TCP request to a backend that was removed from the API.
 */
static __always_inline bool is_orphan(const struct packet *p,
				      const struct flow_hit *hit)
{
	const struct flow *f = hit->flow;

	return !hit->reply && p->key.proto == IPPROTO_TCP &&
	       p->fragment == WHOLE &&
	       (__s32)(f->backend_generation - first_generation) >= 0 &&
	       !backend_of(f->backend, f->backend_generation, f->service);
}

#endif
