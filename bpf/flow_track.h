/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_TRACK_H
#define TANDEM_FLOW_TRACK_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "clock.h"
#include "flow_index.h"
#include "flow_life.h"
#include "packet.h"
#include "packet_successor.h"

/* Accounts for a packet of a flow, and moves the flow to its next stage. */
static __always_inline void flow_account(const struct flow_hit *hit,
					 const struct packet *p, __u32 len)
{
	struct flow *f = hit->flow;
	__u32 flags = 0, all, now = now_s();
	__u32 way = hit->reply & 1; /* bounds it for the verifier */

	/* Without a process that serves, removed backends are not known. UDP
	 * clients may send for ever, so of requests that are not answered only
	 * the first keeps such a flow alive. */
	if (f->seen != now &&
	    (hit->reply || !(hit->flags & FLOW_WAITING) || !serves_old_only()))
		f->seen = now;
	if (hit->reply) {
		if (hit->flags & FLOW_WAITING)
			__sync_fetch_and_and(&f->flags, ~FLOW_WAITING);
	} else if (p->key.proto != IPPROTO_TCP && serves_old_only()) {
		flags |= FLOW_WAITING;
	}
	/* Not atomic: two packets at once on two CPUs may count as one. */
	f->packets[way]++;
	f->bytes[way] += len;

	if (hit->reply)
		flags |= FLOW_REPLIED;
	if (p->key.proto == IPPROTO_TCP && p->fragment != LATER_FRAGMENT) {
		if (p->tcp_flags & TCP_FIN)
			flags |= hit->reply ? FLOW_FIN_REPLY : FLOW_FIN_REQUEST;
		if (p->tcp_flags & TCP_RST)
			flags |= FLOW_CLOSED;
		if (!hit->reply && hit->flags & FLOW_REPLIED &&
		    (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_ACK)
			flags |= FLOW_ESTABLISHED;
	} else if (p->key.proto != IPPROTO_TCP && hit->flags & FLOW_REPLIED) {
		flags |= FLOW_ESTABLISHED;
	}
	all = hit->flags | flags;
	if ((all & (FLOW_FIN_REQUEST | FLOW_FIN_REPLY)) ==
	    (FLOW_FIN_REQUEST | FLOW_FIN_REPLY))
		flags |= FLOW_CLOSED;
	flags &= ~hit->flags;
	if (!flags)
		return;
	__sync_fetch_and_or(&f->flags, flags);
	if (flags & FLOW_CLOSED)
		flow_release(hit->id, hit->life, p->key.proto);
	else if (flags & FLOW_ESTABLISHED && !(all & FLOW_CLOSED))
		flow_keep(hit->id, hit->life, p->key.proto);
}

#endif
