/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_CHOICE_H
#define TANDEM_CHOICE_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/pkt_cls.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "backend.h"
#include "check.h"
#include "flow_maps.h"
#include "frontend.h"
#include "global.h"
#include "node.h"
#include "packet.h"
#include "reasons.h"
#include "service_stats.h"
#include "target.h"
#include "tc_config.h"
#include "verdict.h"
#include "wrapper.h"

/* How many backends are tried, until one is live. */
#define SELECT_ATTEMPTS 3

/* The decision for a new connection. */
struct choice {
	struct frontend_ref frontend;
	__u32 backend;
	__u32 generation; /* of the backend */
	__u32 route;
	__u32 service;
	/* In bytes, for want of room on the stack. */
	__u8 found;	       /* enum frontend_result */
	__u8 result;	       /* enum select_result, set by choose() */
	__u8 reason;	       /* enum reason, if something went wrong */
	__u8 action;	       /* enum flow_action, set by plan() */
	struct flow_key reply; /* likewise; the port may still change */
	__u64 flow;	       /* the word of the flow that was created */
};

/* Finds the frontend that a packet is sent to: that of its address, or a
 * NodePort. wrapper is the node that sent it by direct server return, NULL for
 * none. It may do so for NodePorts of its own address. */
static __always_inline enum frontend_result
packet_frontend(const struct flow_key *packet, const __be32 *wrapper,
		struct frontend_ref *fe)
{
	struct frontend_key key = {
		.port = packet->dport,
		.proto = packet->proto,
		.scope = SCOPE_ADDRESS,
	};
	enum frontend_result found;

	if (!port_has_frontend(packet->proto, bpf_ntohs(packet->dport)))
		return FRONTEND_NONE;
	copy_addr(key.addr, packet->dst);
	found = frontend_lookup(&key, fe);
	if (found != FRONTEND_NONE ||
	    (!(wrapper && same_addr(key.addr, wrapper)) &&
	     !(local_flags(key.addr) & LOCAL_NODE_PORTS)))
		return found;
	frontend_key_node(&key);
	return frontend_lookup(&key, fe);
}

/* What comes in by an uplink is from another machine, even if its source is in
 * the range of the cluster's pods. For a ClusterIP that makes no difference:
 * all origins have the same set there, and a connection from an uplink to
 * another node gets this node's address in any case. */
static __always_inline enum lb_origin origin_of(const __be32 *client)
{
	const struct node *node = this_node();

	if (from_pod || (role == ROLE_POD && node && is_pod(node, client)))
		return FROM_POD;
	return local_flags(client) ? FROM_HOST : FROM_OUTSIDE;
}

/* Whether netfilter has to see packets to the frontend untranslated. */
static __always_inline bool is_left(const struct choice *c)
{
	return c->found == FRONTEND_FOUND && c->frontend.flags & FRONTEND_LEFT;
}

/* Whether a packet without a flow is for this project: CHOSEN, or a verdict,
 * and NO_FLOW if it is not for a Service. It may be for an address without a
 * frontend that is rejected. */
GLOBAL int claim(const struct packet *p, struct choice *c)
{
	__be32 dst[4];

	if (!p || !c)
		return NEXT;
	c->found = packet_frontend(&p->key, wrapper_of(p), &c->frontend);
	if (c->found == FRONTEND_NONE) {
		/* Linux 6.1 takes map keys from the stack, but not from the
		 * caller of a global function. */
		copy_addr(dst, p->key.dst);
		if (!is_unserved(dst) || local_flags(dst))
			return NO_FLOW;
	}
	if (is_left(c))
		return NEXT;
	if (!is_martian(p->key.src))
		return CHOSEN;
	c->reason = PASS_MARTIAN;
	return NEXT;
}

/* Picks a backend for a packet that was claimed. Nothing is counted: the packet
 * may still be left to another program. */
GLOBAL int choose(const struct packet *p, struct choice *c)
{
	enum select_result result = SELECT_RACED;
	struct affinity chosen;
	struct frontend_ref fe;
	struct backend *be = NULL;
	__u32 pick;
	__be32 src[4];

	if (!p || !c)
		return NEXT;
	copy_addr(src, p->key.src);
	for (int i = 0; i < SELECT_ATTEMPTS; i++) {
		if (i)
			c->found = packet_frontend(&p->key, wrapper_of(p),
						   &c->frontend);
		if (c->found == FRONTEND_NONE) {
			if (i) /* it was deleted meanwhile */
				break;
			result = SELECT_REJECT;
			break;
		}
		/* A reset for a connection that ended already. */
		if (p->key.proto == IPPROTO_TCP && p->tcp_flags & TCP_RST) {
			if (p->wrapped == WRAPPED)
				return NO_FLOW;
			c->reason = PASS_RST;
			return NEXT;
		}
		if (c->found == FRONTEND_RACED)
			continue;
		if (is_left(c))
			return NEXT;
		fe = c->frontend;
		c->service = fe.service;
		if (!frontend_admits(&fe, p->key.dst, p->key.src)) {
			c->result = SELECT_DROP;
			if (fe.flags & FRONTEND_REJECT)
				return NOT_ADMITTED;
			c->reason = DROP_SOURCE_RANGE;
			return TC_ACT_SHOT;
		}
		c->route = frontend_route(&fe, p->key.dst, origin_of(src));
		/* A hash of the connection: the same backend again if its flow
		 * was evicted, and with Maglev on every node. With Maglev and
		 * affinity, of the client, which other nodes may know; else a
		 * client whose affinity timed out would never get another
		 * backend. */
		if (fe.flags & FRONTEND_BY_CLIENT)
			pick = check_of(src, sizeof(src) / sizeof(__u32));
		else
			pick = check_of((const __u32 *)&p->key,
					sizeof(p->key) / sizeof(__u32));
		be = NULL;
		if (p->wrapped == WRAPPED)
			be = target_of(fe.service, &chosen);
		/* By the time of a retransmission, the nodes may agree. */
		if (is_bound(p) &&
		    (!be || is_bound_elsewhere(p, be->addr, be->port))) {
			c->result = SELECT_REJECT;
			if (!is_opening(p))
				return REFUSED;
			c->result = SELECT_RACED;
			c->reason = DROP_NO_TARGET;
			return TC_ACT_SHOT;
		}
		if (be)
			result = SELECT_OK;
		else
			be = select_backend(&fe, src, pick, &chosen, &result);
		if (result != SELECT_RACED)
			break;
	}
	c->result = result;
	if (!be) {
		if (result == SELECT_REJECT)
			return REFUSED;
		c->reason = result == SELECT_DROP ? DROP_POLICY : DROP_RACED;
		return TC_ACT_SHOT;
	}
	c->backend = chosen.backend;
	c->generation = chosen.generation;
	return CHOSEN;
}

/* Counts what came of choose(). */
static __always_inline void count_choice(const struct choice *c)
{
	count_connection(c->service, c->result, c->backend,
			 role == ROLE_UPLINK);
}

#endif
