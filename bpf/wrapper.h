/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_WRAPPER_H
#define TANDEM_WRAPPER_H

#include <linux/bpf.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_helpers.h>

#include "flow_index.h"
#include "packet.h"

/*
 * A packet in a packet, for direct server return: the client's packet to a
 * frontend is the payload of one from the node where it arrived to the backend.
 * The backend's node takes it out.
 */
struct wrapper {
	__be32 src[4]; /* of the outer packet: the node that sent it */
	__be32 dst[4]; /* of the outer packet: the backend */
	__u8 ecn_ce;   /* a router has marked it: congestion (RFC 6040) */
	/* What takes too much room on the stack. */
	struct packet inner;
	struct flow_hit hit;
	union {
		struct iphdr v4;
		struct ipv6hdr v6;
	} header;
};

/* The last one on this CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct wrapper);
	__uint(max_entries, 1);
} tdm_wrapper SEC(".maps");

static __always_inline struct wrapper *last_wrapper(void)
{
	const __u32 zero = 0;

	return bpf_map_lookup_elem(&tdm_wrapper, &zero);
}

/* The node that sent a packet in an IP packet; NULL for others. */
static __always_inline const __be32 *wrapper_of(const struct packet *p)
{
	const struct wrapper *w;

	if (p->wrapped != WRAPPED)
		return NULL;
	w = last_wrapper();
	return w ? w->src : NULL;
}

#endif
