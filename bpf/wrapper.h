/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_WRAPPER_H
#define TANDEM_WRAPPER_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "csum.h"
#include "flow_index.h"
#include "geneve.h"
#include "global.h"
#include "option.h"
#include "packet.h"
#include "tc_config.h"

/*
 * A packet in a packet, for direct server return: the client's packet to a
 * frontend is the payload of one from the node where it arrived to the backend.
 * The backend's node takes it out. Or the client's packet itself, to the
 * backend, with the frontend in an option.
 */
struct wrapper {
	__be32 src[4]; /* of the outer packet: the node that sent it. With an
			* option: the node whose address it has, or that sent a
			* probe; for none, an address of the other family,
			* which no address of the packet equals */
	__be32 dst[4]; /* of the outer packet: the backend */
	__u8 ecn_ce;   /* a router has marked it: congestion (RFC 6040) */
	__u8 form;     /* enum dispatch */
	__be16 port;   /* with an option: of the backend */
	/* What takes too much room on the stack. */
	struct packet inner;
	struct flow_hit hit;
	struct {
		union {
			struct iphdr v4;
			struct ipv6hdr v6;
		};
		union {
			struct geneve geneve;
			struct option_v4 option4;
			struct option_v6 option6;
		};
	} header;
};

#define WRAPPER_TTL 64
#define IP_DF 0x4000

/* The IPv4 header that is put before a packet; len includes it. The packet's
 * size was checked, so routers must not fragment it. The class is the packet's,
 * with the marks of ECN. */
static __always_inline void
wrapper_v4(struct iphdr *ip, const struct flow_key *to, __u8 tos, __u32 len)
{
	const __u16 *words = (const __u16 *)ip;
	__u64 sum = 0;

	*(__u8 *)ip = 0x45; /* version, length in words */
	ip->tos = tos;
	ip->tot_len = bpf_htons(len);
	ip->id = 0;
	ip->frag_off = bpf_htons(IP_DF);
	ip->ttl = WRAPPER_TTL;
	ip->protocol = dispatch == DISPATCH_GENEVE ? IPPROTO_UDP : IPPROTO_IPIP;
	ip->check = 0;
	ip->saddr = to->src[3];
	ip->daddr = to->dst[3];
#pragma unroll
	for (int i = 0; i < sizeof(*ip) / sizeof(*words); i++)
		sum += words[i];
	ip->check = ~fold(sum);
}

/* Likewise of IPv6. first has the packet's version, class and flow label. */
static __always_inline void wrapper_v6(struct ipv6hdr *ip,
				       const struct flow_key *to, __be32 first,
				       __u32 len)
{
	*(__be32 *)ip = first;
	ip->payload_len = bpf_htons(len - sizeof(*ip));
	ip->nexthdr = dispatch == DISPATCH_GENEVE ? IPPROTO_UDP : IPPROTO_IPV6;
	ip->hop_limit = WRAPPER_TTL;
	copy_addr((__be32 *)&ip->saddr, to->src);
	copy_addr((__be32 *)&ip->daddr, to->dst);
}

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

#define WRAPPED_FLAGS (FLOW_WRAPPED | FLOW_GENEVE | FLOW_OPTION)

/* How the first request of a flow came: those of WRAPPED_FLAGS. */
static __always_inline __u32 wrapped_flags(const struct packet *p)
{
	const struct wrapper *w = last_wrapper();

	if (p->wrapped != WRAPPED || !w)
		return 0;
	switch (w->form) {
	case DISPATCH_GENEVE:
		return FLOW_WRAPPED | FLOW_GENEVE;
	case DISPATCH_OPT:
		return FLOW_WRAPPED | FLOW_OPTION;
	}
	return FLOW_WRAPPED;
}

/* The form that these flags stand for. */
static __always_inline enum dispatch form_of(__u32 flags)
{
	return flags & FLOW_OPTION ? DISPATCH_OPT :
	       flags & FLOW_GENEVE ? DISPATCH_GENEVE :
				     DISPATCH_IPIP;
}

/* Whether another node will send other segments of a packet's connection
 * without an option, to the backend that it selected. */
static __always_inline bool is_bound(const struct packet *p)
{
	const struct wrapper *w;

	if (p->wrapped != WRAPPED || p->key.proto != IPPROTO_TCP)
		return false;
	w = last_wrapper();
	return w && w->form == DISPATCH_OPT;
}

/* Whether that is another backend than this one. Later fragments do not tell
 * its port. */
static __always_inline bool is_bound_elsewhere(const struct packet *p,
					       const __be32 *addr, __be16 port)
{
	const struct wrapper *w = last_wrapper();

	return is_bound(p) && w &&
	       (!same_addr(w->dst, addr) ||
		(w->port != port && p->fragment != LATER_FRAGMENT));
}

/* The same with the destination of a flow, on a stack of its own: five frames
 * have to fit 512 bytes. */
GLOBAL int leads_elsewhere(const struct packet *p, const struct flow_key *to)
{
	return p && to && is_bound_elsewhere(p, to->dst, to->dport);
}

/* The node whose NodePorts a packet may be for, of direct server return; NULL
 * of others. */
static __always_inline const __be32 *wrapper_of(const struct packet *p)
{
	const struct wrapper *w;

	if (p->wrapped != WRAPPED)
		return NULL;
	w = last_wrapper();
	return w ? w->src : NULL;
}

#endif
