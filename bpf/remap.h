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
	       (p->key.proto != IPPROTO_TCP || is_opening(p));
}

/*
 * Whether a flow has the replies to a packet, and translates them; also one
 * that ended just now, of which packets may be under way. Other flows are not
 * concerned: the packet may be theirs, translated already.
 */
GLOBAL int is_taken(const struct packet *p, bool ingress)
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
	/* Segments to the backend may be of that flow, see owns_port(). */
	if ((hit.flags & (FLOW_OPTION | FLOW_CLOSED)) == FLOW_OPTION &&
	    p->key.proto == IPPROTO_TCP)
		return false;
	return hit.reply && is_ingress(&hit) != ingress;
}

/*
 * Whether connections get another source port if theirs is taken. Who sent them
 * does not know of that flow: netfilter, a socket that is bound to the port, or
 * a client that used it for a Service and uses it for the backend itself now.
 * On uplinks, datagrams of clients are not worth the lookup: most are of
 * tunnels.
 */
static __always_inline bool remaps(const struct packet *p, bool ingress)
{
	if (role == ROLE_POD)
		return ingress;
	return !ingress || p->key.proto == IPPROTO_TCP;
}

/*
 * Creates a flow for a connection that is not to a Service, if another flow has
 * the replies to its source port. Returns whether there is one now. It may be a
 * packet of that flow which a newer program has seen: whether it was redirected
 * is asked once.
 */
static __always_inline bool remap(struct __sk_buff *skb, struct packet *p,
				  bool ingress)
{
	struct choice c = {
		.action = ingress ? ACTION_REMAP_IN : ACTION_REMAP_OUT,
	};

	if (!remaps(p, ingress) || !may_begin(p) || !is_taken(p, ingress) ||
	    flow_other() == OTHER_AHEAD)
		return false;
	turn_around(&c.reply, &p->key);
	return create(skb, p, &c) == FLOW_MADE;
}

#endif
