/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FRONTEND_H
#define TANDEM_FRONTEND_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "check.h"
#include "lb_maps.h"

/* The fields of a frontend, copied since the element may be reused. */
struct frontend_ref {
	__u32 service;
	__u32 flags;
	__u32 affinity;
	__u32 set; /* set by frontend_route() */
};

enum frontend_result {
	FRONTEND_FOUND,
	FRONTEND_NONE,
	FRONTEND_RACED, /* inconsistent read: try again */
};

static __always_inline __u32 frontend_check(const struct frontend_key *key,
					    __u32 service, __u32 flags,
					    __u32 affinity)
{
	__u32 words[sizeof(*key) / sizeof(__u32) + 3];

	__builtin_memcpy(words, key, sizeof(*key));
	words[sizeof(*key) / sizeof(__u32)] = service;
	words[sizeof(*key) / sizeof(__u32) + 1] = flags;
	words[sizeof(*key) / sizeof(__u32) + 2] = affinity;
	return check_of(words, sizeof(words) / sizeof(words[0]));
}

/* Whether there is a frontend with a port of TCP or UDP, in host byte order. */
static __always_inline bool port_has_frontend(__u8 proto, __u16 port)
{
	__u32 index = port / 64;
	const __u64 *bits;

	if (proto == IPPROTO_UDP)
		index += PORT_WORDS / 2;
	bits = bpf_map_lookup_elem(&tdm_port, &index);
	return bits && *(volatile __u64 *)bits >> (port % 64) & 1;
}

/* Turns a key into that of a NodePort, for any address of its family. */
static __always_inline void frontend_key_node(struct frontend_key *key)
{
	key->scope = SCOPE_NODE;
	if (is_v4(key->addr))
		key->addr[3] = 0;
	else
		key->addr[0] = key->addr[1] = key->addr[2] = key->addr[3] = 0;
}

/*
 * A miss is reliable, since user space updates in place (BPF_F_LOCK). An
 * ordinary update links a new element at the head of the bucket and then
 * unlinks the old one; a lookup in between may find neither.
 *
 * Two races remain: a deleted element that is reused, and a value that is just
 * being copied. The check detects both. Taking the lock would not help against
 * the first, and would make all CPUs that dial one address write to one cache
 * line.
 */
static __always_inline enum frontend_result
frontend_lookup(const struct frontend_key *key, struct frontend_ref *ref)
{
	const volatile struct frontend *fe =
		bpf_map_lookup_elem(&tdm_frontend, key);

	if (!fe)
		return FRONTEND_NONE;
	ref->service = fe->service;
	ref->flags = fe->flags;
	ref->affinity = fe->affinity;
	if (fe->check !=
	    frontend_check(key, ref->service, ref->flags, ref->affinity))
		return FRONTEND_RACED;
	return FRONTEND_FOUND;
}

/* Selects and returns the route for an origin. */
static __always_inline __u32 frontend_route(struct frontend_ref *ref,
					    const __be32 *vip,
					    enum lb_origin origin)
{
	__u32 route = ref->flags >> (origin * ROUTE_BITS);

	ref->set = ref->service * SETS_PER_SERVICE;
	if (!is_v4(vip))
		ref->set += SET_V6_CLUSTER - SET_V4_CLUSTER;
	if (route & ROUTE_LOCAL)
		ref->set += SET_V4_LOCAL - SET_V4_CLUSTER;
	return route & ((1 << ROUTE_BITS) - 1);
}

/* Whether the source ranges admit a client whose address is known. */
static __always_inline bool frontend_admits(const struct frontend_ref *ref,
					    const __be32 *vip,
					    const __be32 *client)
{
	struct range_key key = {
		.prefix_len = 8 * (sizeof(key) - sizeof(key.prefix_len)),
		.service = ref->service,
	};

	if (!(ref->flags & FRONTEND_FILTERED))
		return true;
	if (ref->flags & FRONTEND_SELF && same_addr(vip, client))
		return true;
	copy_addr(key.addr, client);
	return bpf_map_lookup_elem(&tdm_range, &key);
}

#endif
