/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_MASQUERADE_H
#define TANDEM_MASQUERADE_H

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "flow_maps.h"
#include "lb_types.h"
#include "node.h"
#include "packet.h"
#include "route.h"
#include "tc_config.h"

/* Whether a backend is on another node; then reply->dst is set to the address
 * of this node that connects to it. */
static __always_inline bool is_remote(struct __sk_buff *skb,
				      const struct packet *p,
				      const struct backend *be,
				      struct flow_key *reply)
{
	struct bpf_fib_lookup fib;
	struct flow_key to = { .dport = be->port, .proto = p->key.proto };
	__u32 ifindex;
	long found;

	if (be->flags & BACKEND_LOCAL || local_flags(be->addr))
		return false;
	copy_addr(to.dst, be->addr);
	/* A length that fits any MTU; 0 would stand for that of this packet. */
	found = route(skb, &fib, &to, 1, have_fib_source ? FIB_SOURCE : 0);
	if (found != BPF_FIB_LKUP_RET_SUCCESS &&
	    found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return false;
	/* Behind a device that is no uplink: the backend is on this node. */
	ifindex = fib.ifindex;
	if (!bpf_map_lookup_elem(&tdm_uplink, &ifindex))
		return false;
	if (have_fib_source && !p->v6)
		set_v4(reply->dst, fib.ipv4_src);
	else if (have_fib_source)
		copy_addr(reply->dst, fib.ipv6_src);
	else
		node_addr(p->v6, reply->dst);
	return true;
}

/*
 * Whether a connection is masqueraded; then reply->dst is set to this node's
 * address. From an uplink, that is every connection to a remote backend: its
 * replies would not pass here otherwise. From a pod, it is the connection to
 * the pod itself, and what the route masquerades if the backend is remote:
 * replies of other pods on this node would be taken for replies to the host.
 */
static __always_inline bool is_masqueraded(struct __sk_buff *skb,
					   const struct packet *p,
					   const struct backend *be,
					   __u32 route, struct flow_key *reply)
{
	if (role == ROLE_UPLINK)
		return is_remote(skb, p, be, reply);
	if (same_addr(be->addr, p->key.src)) {
		node_addr(p->v6, reply->dst);
		return true;
	}
	return route & ROUTE_MASQUERADE && is_remote(skb, p, be, reply);
}

#endif
