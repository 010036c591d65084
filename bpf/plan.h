/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_PLAN_H
#define TANDEM_PLAN_H

#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "choice.h"
#include "context.h"
#include "flow_types.h"
#include "global.h"
#include "lb_maps.h"
#include "length.h"
#include "node.h"
#include "packet.h"
#include "reasons.h"
#include "route.h"
#include "tc_config.h"
#include "uplink.h"
#include "verdict.h"

/* The address of this node that a remote backend sees. */
static __always_inline void source_of(const struct packet *p,
				      const struct bpf_fib_lookup *fib,
				      const struct uplink *up, __be32 *source)
{
	const __be32 *own = p->v6 ? up->addr6 : up->addr4;

	if (have_fib_source && !p->v6)
		set_v4(source, fib->ipv4_src);
	else if (have_fib_source)
		copy_addr(source, fib->ipv6_src);
	else if (!is_zero(own))
		copy_addr(source, own);
	else
		node_addr(p->v6, source);
}

/* Whether the route to a backend masquerades connections. From an uplink, that
 * is every connection to a remote backend: its replies would not pass here
 * otherwise. From a pod, it is what the table says: replies of other pods on
 * this node would be taken for replies to the host. */
static __always_inline bool may_masquerade(const struct backend *be,
					   __u32 route)
{
	if (role == ROLE_POD && !(route & ROUTE_MASQUERADE))
		return false;
	return !(be->flags & BACKEND_LOCAL) && !local_flags(be->addr);
}

/* Whether a client is a node of the cluster, or a pod of another node. */
static __always_inline bool is_of_cluster(const __be32 *client)
{
	struct range_key key = {
		.prefix_len = 8 * (sizeof(key) - sizeof(key.prefix_len)),
		.service = TARGET_NODE,
	};
	const struct node *node = this_node();

	if (node && is_pod(node, client))
		return true;
	copy_addr(key.addr, client);
	return bpf_map_lookup_elem(&tdm_range, &key);
}

/* Whether a backend on another node gets the client's packets by direct server
 * return. One that came so is not sent on: two nodes that disagree would
 * send it to and fro. Clients of the cluster may be on the backend's node,
 * where the packets would come from an address of that node's own, and replies
 * would not leave it. */
static __always_inline bool may_go_direct(const struct packet *p,
					  const struct choice *c,
					  const struct backend *be,
					  const __be32 *source)
{
	if (role != ROLE_UPLINK || !(c->route & ROUTE_DIRECT) ||
	    !(be->flags & BACKEND_DIRECT) || p->wrapped != BARE ||
	    is_of_cluster(p->key.src))
		return false;
	/* Other nodes know this one's NodePorts by the outer source. */
	return c->frontend.flags >> FRONTEND_KIND_SHIFT != KIND_NODE_PORT ||
	       same_addr(p->key.dst, source);
}

/*
 * Plans how the chosen backend is reached: the action, the route and the source
 * address. Nothing is written before it is known that the action can be carried
 * out. Where a backend is, its EndpointSlice says; routes decide for those that
 * have no nodeName.
 */
GLOBAL int plan(CONTEXT *ctx, struct packet *p, struct choice *c)
{
	struct bpf_fib_lookup *fib = last_route();
	struct flow_key to = {};
	const struct uplink *up;
	struct backend *be;
	__be32 source[4] = {};
	bool to_itself;
	__u32 id;
	__u16 len;
	long found;

	if (!p || !c || !fib)
		return NEXT;
	id = c->backend;
	be = bpf_map_lookup_elem(&tdm_backend, &id);
	if (!be) {
		c->reason = DROP_RACED;
		return TC_ACT_SHOT;
	}
	c->action = ACTION_LOCAL;
	copy_addr(c->reply.src, be->addr);
	copy_addr(c->reply.dst, p->key.src);
	c->reply.sport = be->port;
	c->reply.dport = p->key.sport;
	c->reply.proto = p->key.proto;
	to_itself = role == ROLE_POD && same_addr(be->addr, p->key.src);
	if (!to_itself && !may_masquerade(be, c->route))
		return CHOSEN;

	copy_addr(to.dst, be->addr);
	to.dport = be->port;
	to.proto = p->key.proto;
	/* A length that fits any MTU: what is for the stack is not checked. */
	found = route(ctx, p, fib, &to, 1, have_fib_source ? FIB_SOURCE : 0);
	if (!has_route(found)) {
		/* The route may come back; the stack would make the client give
		 * up. */
		if (to_itself || be->flags & BACKEND_REMOTE) {
			c->reason = DROP_NO_ROUTE;
			return TC_ACT_SHOT;
		}
		return CHOSEN;
	}
	id = fib->ifindex;
	up = uplink_of(id);
	if (to_itself) {
		node_addr(p->v6, source);
	} else if (up) {
		source_of(p, fib, up, source);
	} else {
		/* No program would translate replies to an address of this
		 * node, so the backend sees the client. Replies that pass this
		 * node reach it; others do not. */
		if (be->flags & BACKEND_REMOTE)
			c->reason = PASS_NO_UPLINK;
		return CHOSEN;
	}
	if (p->ttl <= 1)
		return EXPIRED;
	c->action = ACTION_SNAT;
	if (!to_itself && may_go_direct(p, c, be, source))
		c->action = ACTION_DIRECT;
	len = sent_len(ctx, p, c->action);
	/* The kernel tells the MTU only if it knows the neighbour too. */
	if (found == BPF_FIB_LKUP_RET_NO_NEIGH)
		found = route(ctx, p, fib, &to, len, 0);
	else if (fib->mtu_result && len > fib->mtu_result)
		found = BPF_FIB_LKUP_RET_FRAG_NEEDED;
	if (found == BPF_FIB_LKUP_RET_FRAG_NEEDED) {
		p->mtu = fib->mtu_result - wrapper_len(p, c->action);
		return TOO_BIG;
	}
	copy_addr(c->reply.dst, source);
	return CHOSEN;
}

#endif
