/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_NEXT_HOP_H
#define TANDEM_NEXT_HOP_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "flow_index.h"
#include "packet.h"
#include "route.h"
#include "uplink.h"

/* Where packets are redirected to. */
struct next_hop {
	__u64 flow;    /* of which flow, and which direction; 0 for none */
	__u32 tick;    /* packet.tick when the route was looked up */
	__u32 from;    /* index of the device that packets come in by */
	__u32 to;      /* index of the device that they go out by */
	__u16 mtu;     /* of the route, in bytes */
	__u8 family;   /* of addr, which may be another one than the packet's */
	__u8 redirect; /* enum uplink_redirect */
	__be32 addr[4];
};

#define NEXT_HOPS 512 /* a power of two */

/*
 * The next hops of flows, each found by a lookup of its route in this tick of
 * the kernel's clock, 1 to 10 ms. That saves most lookups of a flow with many
 * packets, and no change of a route is missed for longer, whether a process of
 * this project runs or not. The last one is for packets of no flow.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct next_hop);
	__uint(max_entries, NEXT_HOPS + 1);
} tdm_next_hop SEC(".maps");

static __always_inline struct next_hop *next_hop_at(__u32 index)
{
	return bpf_map_lookup_elem(&tdm_next_hop, &index);
}

static __always_inline struct next_hop *next_hop_of(const struct flow_hit *hit)
{
	return next_hop_at(way_of(hit) & (NEXT_HOPS - 1));
}

/* Takes over the route that was looked up last. */
static __always_inline void next_hop_set(struct next_hop *nh,
					 const struct bpf_fib_lookup *fib)
{
	const struct uplink *up = uplink_of(fib->ifindex);

	nh->flow = 0;
	nh->to = fib->ifindex;
	nh->family = fib->family;
	nh->redirect = up ? up->redirect : REDIRECT_NEXT_HOP;
	/* The next hop may be of the other family; then ipv6_dst holds more. */
	if (fib->family == AF_INET)
		nh->addr[0] = fib->ipv4_dst;
	else
		copy_addr(nh->addr, fib->ipv6_dst);
}

/* Keeps the next hop for other packets of the flow in this tick. The kernel
 * tells the MTU only if it knows the neighbour too. */
static __always_inline void next_hop_keep(struct next_hop *nh,
					  const struct flow_hit *hit,
					  const struct packet *p, __u32 from,
					  __u16 mtu)
{
	if (!mtu)
		return;
	nh->tick = p->tick;
	nh->from = from;
	nh->mtu = mtu;
	nh->flow = way_of(hit);
}

/* Whether the next hop is that of a packet of a flow. */
static __always_inline bool next_hop_is(const struct next_hop *nh,
					const struct flow_hit *hit,
					const struct packet *p, __u32 from,
					__u16 len)
{
	return nh->flow == way_of(hit) && nh->tick == p->tick &&
	       nh->from == from && len <= nh->mtu;
}

#endif
