/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_REMAP_H
#define TANDEM_REMAP_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "choice.h"
#include "flow_create.h"
#include "flow_index.h"
#include "flow_key.h"
#include "packet.h"
#include "tc_config.h"

/* Whether a packet without a flow may begin a connection. */
static __always_inline bool may_begin(const struct packet *p)
{
	return p->fragment != LATER_FRAGMENT &&
	       (p->key.proto != IPPROTO_TCP ||
		(p->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN);
}

/*
 * Whether a flow has the replies to a packet of this host; also one that ended
 * just now, of which packets may be under way. Netfilter does not know the
 * ports of remapped connections either, and gives them away again. Flows whose
 * source port is the client's are not concerned: the packet may be theirs.
 */
GLOBAL int is_taken(const struct packet *p)
{
	struct flow_key reply;
	struct flow_hit hit;

	if (!p)
		return false;
	turn_around(&reply, &p->key);
	if (!flow_find(&reply, &hit))
		return false;
	/* Otherwise the compiler reads the hit that there is not. */
	barrier();
	return hit.reply && hit.action != ACTION_LOCAL;
}

/*
 * Creates a flow for a connection that leaves this host by a source port of
 * which another flow has the replies: netfilter, or a socket that is bound to
 * the port, does not know of that flow. Returns whether there is one now.
 */
static __always_inline bool remap(struct __sk_buff *skb, struct packet *p)
{
	struct choice c = { .action = ACTION_REMAP };

	if (role != ROLE_UPLINK || !may_begin(p) || !is_taken(p))
		return false;
	turn_around(&c.reply, &p->key);
	return create(skb, p, &c) == FLOW_MADE;
}

#endif
