/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_STALE_H
#define TANDEM_FLOW_STALE_H

#include <linux/in.h>
#include <stdbool.h>

#include "backend.h"
#include "clock.h"
#include "flow_index.h"
#include "packet.h"
#include "packet_successor.h"
#include "tc_config.h"

/* While no process ends UDP flows, one ends whose request is not answered for
 * so long, in seconds, because its backend may be gone; and one that is silent
 * for as long as netfilter lets it be (nf_conntrack_udp_timeout_stream). */
#define UNANSWERED_S 30
#define SILENT_S 120

/* Whether the backend of a flow is still there, and its node still takes
 * direct server return. */
static __always_inline bool takes_direct(const struct flow *f)
{
	const struct backend *be =
		backend_of(f->backend, f->backend_generation, f->service);

	return be && be->flags & BACKEND_DIRECT;
}

/* Whether the backend of a flow was removed. Tables that were made after the
 * flow do not know its backend; user space gives it the one of theirs. */
static __always_inline bool lost_backend(const struct flow *f)
{
	return (__s32)(f->backend_generation - first_generation) >= 0 &&
	       !backend_of(f->backend, f->backend_generation, f->service);
}

/* Whether a packet without a flow is left to an earlier program, which may have
 * its flow. Datagrams that may be so get the same backend from either. */
static __always_inline bool is_for_earlier(const struct packet *p)
{
	return p->key.proto == IPPROTO_TCP && !is_opening(p) &&
	       flow_other() == OTHER_BEHIND;
}

/* Whether a packet starts a new connection in place of its flow, or the flow's
 * backend serves no longer; or the client comes by another node now, which
 * selected another backend: nodes that send a packet to each other would form a
 * loop. */
static __always_inline bool is_over(const struct packet *p,
				    const struct flow_hit *hit)
{
	const struct flow *f = hit->flow;

	if (hit->reply)
		return false;
	if (hit->action == ACTION_DIRECT && p->wrapped == WRAPPED)
		return true;
	if (p->key.proto == IPPROTO_TCP) {
		if (!is_opening(p))
			return false;
		/* The other proxy gets all new connections to Services. */
		if (hit->flags & FLOW_CLOSED ||
		    (serves_old_only() && !is_remapped(hit)))
			return true;
		if (hit->action == ACTION_DIRECT)
			return !takes_direct(f);
		if (hit->flags & FLOW_ESTABLISHED)
			return false;
	} else if (has_yielded() &&
		   now_s() - f->seen > (hit->flags & FLOW_WAITING ?
						UNANSWERED_S :
						SILENT_S)) {
		return true;
	}
	return lost_backend(f);
}

/* Whether a packet is a TCP request to a backend that was removed from the API.
 */
static __always_inline bool is_orphan(const struct packet *p,
				      const struct flow_hit *hit)
{
	return !hit->reply && p->key.proto == IPPROTO_TCP &&
	       p->fragment == WHOLE && lost_backend(hit->flow);
}

#endif
