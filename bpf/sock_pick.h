/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SOCK_PICK_H
#define TANDEM_SOCK_PICK_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "backend.h"
#include "frontend.h"
#include "global.h"
#include "lb_config.h"
#include "lb_maps.h"
#include "node.h"
#include "sock_addr.h"

enum picked {
	PICKED,
	PICKED_AGAIN, /* keeps the backend it has */
	PICKED_REJECT,
	PICKED_DROP,
	PICKED_SHUT_OUT, /* by source ranges: rejected */
	PICKED_RACED,	 /* inconsistent read during an update */
	PICKED_NONE,	 /* no frontend has that address and port */
	PICKED_NOT_OURS, /* the namespace opted out */
};

enum admission {
	ADMITTED,
	SHUT_OUT,
	ASK_THE_PACKET, /* the source is known when it sends: see tdm_guard */
};

/* Which socket needs a backend, and the backend it gets. */
struct pick {
	__u64 netns;
	__be32 source[4]; /* if bound */
	__u8 bound;	  /* to an address */
	__u8 sending;	  /* without a connection */
	__u8 guarded;	  /* source ranges have to be checked per packet */
	__u8 node_port;	  /* the frontend would be one */
	__u32 service;
	__u32 backend;
	__u32 generation;
	__be32 addr[4];
	__be16 port;
	__be16 pad2;
	__u32 pad3;
};

/* Sockets of these namespaces are not translated: they opted out, or others
 * serve them. */
static __always_inline bool is_opted_out(__u64 netns)
{
	if (left_pods && netns != host_netns_cookie)
		return true;
	if (left_host && netns == host_netns_cookie)
		return true;
	return bpf_map_lookup_elem(&tdm_optout, &netns) != NULL;
}

/* The address that a socket is bound to, if any. */
static __always_inline bool bound_to(struct bpf_sock *sk, __be32 *addr)
{
	if (!sk)
		return false;
	if (sk->family == AF_INET) {
		set_v4(addr, sk->src_ip4);
		return addr[3];
	}
	addr[0] = sk->src_ip6[0];
	addr[1] = sk->src_ip6[1];
	addr[2] = sk->src_ip6[2];
	addr[3] = sk->src_ip6[3];
	return addr[0] | addr[1] | addr[3];
}

/*
 * Finds the frontend of an address: that of exactly this address, or a
 * NodePort. At loopback addresses, and at the unspecified address, which stands
 * for them, only processes of this host reach NodePorts, and hostPorts there.
 */
static __always_inline enum frontend_result
socket_frontend(const struct frontend_key *dialled, struct pick *x,
		struct frontend_ref *fe)
{
	enum frontend_result found = frontend_lookup(dialled, fe);
	struct frontend_key key = *dialled;
	const struct node *node;

	if (found != FRONTEND_NONE)
		return found;
	if (!(local_flags(key.addr) & LOCAL_NODE_PORTS)) {
		if (x->netns != host_netns_cookie)
			return FRONTEND_NONE;
		if (!key.addr[3] && (is_v4(key.addr) || !key.addr[2]))
			key.addr[3] = is_v4(key.addr) ?
					      bpf_htonl(INADDR_LOOPBACK) :
					      bpf_htonl(1);
		if (is_loopback(key.addr)) {
			key.scope = SCOPE_HOST;
			found = frontend_lookup(&key, fe);
			if (found != FRONTEND_NONE)
				return found;
		}
		node = this_node();
		if (!node || !is_node_loopback(node, key.addr))
			return FRONTEND_NONE;
	}
	frontend_key_node(&key);
	x->node_port = true;
	return frontend_lookup(&key, fe);
}

/*
 * Checks loadBalancerSourceRanges for a socket. What a socket is bound to is no
 * proof: a process may bind to an address that it does not have, and name
 * another one for each datagram.
 */
static __always_inline enum admission admission(const struct frontend_ref *fe,
						const __be32 *vip,
						const struct pick *x)
{
	__be32 source[4];

	if (!(fe->flags & FRONTEND_FILTERED))
		return ADMITTED;
	/* Linux 6.1 takes map keys from the stack, but not from the caller of a
	 * global function. */
	copy_addr(source, x->source);
	if (x->bound && !frontend_admits(fe, vip, x->source))
		return SHUT_OUT;
	if (x->bound && (x->netns != host_netns_cookie || !local_flags(source)))
		return ASK_THE_PACKET;
	if (x->netns == host_netns_cookie) {
		if (x->bound)
			return ADMITTED;
		if (fe->flags & FRONTEND_HOST)
			return ADMITTED;
		/* The source address will be the VIP itself. */
		if (fe->flags & FRONTEND_SELF && local_flags(vip))
			return ADMITTED;
		return SHUT_OUT;
	}
	/* There may be pods whose addresses the detector does not know. */
	return fe->flags & (FRONTEND_ALL_PODS | FRONTEND_SOME_PODS) ?
		       ASK_THE_PACKET :
		       SHUT_OUT;
}

/*
 * Picks the backend for a socket; one attempt. last is the socket's previous
 * destination, if any: an unconnected socket that keeps sending to one service
 * address keeps its backend while that is eligible, as with netfilter's
 * conntrack.
 */
GLOBAL int pick(const struct frontend_key *dialled,
		const struct sock_dest *last, struct pick *x)
{
	enum select_result result;
	struct affinity chosen;
	struct frontend_key key;
	struct frontend_ref fe;
	enum admission admitted;
	struct backend *be;

	if (!dialled || !x)
		return PICKED_NONE;
	key = *dialled;
	switch (socket_frontend(&key, x, &fe)) {
	case FRONTEND_NONE:
		return PICKED_NONE;
	case FRONTEND_RACED:
		return is_opted_out(x->netns) ? PICKED_NOT_OURS : PICKED_RACED;
	case FRONTEND_FOUND:
		break;
	}
	if (is_opted_out(x->netns))
		return PICKED_NOT_OURS;
	x->service = fe.service;
	admitted = admission(&fe, key.addr, x);
	if (admitted == SHUT_OUT)
		return fe.flags & FRONTEND_REJECT ? PICKED_SHUT_OUT :
						    PICKED_DROP;
	x->guarded = admitted == ASK_THE_PACKET;
	frontend_route(&fe, key.addr,
		       x->netns == host_netns_cookie ? FROM_HOST : FROM_POD);
	if (last && x->sending &&
	    same(last->vip, last->vip_port, key.addr, key.port)) {
		be = backend_of(last->backend, last->generation, fe.service);
		if (be && is_member(be, fe.set)) {
			copy_addr(x->addr, be->addr);
			x->port = be->port;
			return PICKED_AGAIN;
		}
	}
	__be32 client[4] = { 0, 0, x->netns >> 32, (__u32)x->netns };

	be = select_backend(&fe, client, bpf_get_prandom_u32(), &chosen,
			    &result);
	if (!be)
		return result == SELECT_REJECT ? PICKED_REJECT :
		       result == SELECT_DROP   ? PICKED_DROP :
						 PICKED_RACED;
	x->backend = chosen.backend;
	x->generation = chosen.generation;
	copy_addr(x->addr, be->addr);
	x->port = be->port;
	return PICKED;
}

#endif
