/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_GENEVE_H
#define TANDEM_GENEVE_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>

#include "btf_emit.h"
#include "context.h"
#include "flow_types.h"

/*
 * What is between the outer IP header and the client's packet in Geneve (RFC
 * 8926): UDP without a checksum, and a header without options. The payload is
 * an IP packet, not a frame.
 */
struct geneve {
	__be16 sport;
	__be16 dport;
	__be16 len;   /* from sport on */
	__be16 check; /* 0 for none, also over IPv6 (RFC 6936) */
	__u8 version; /* 2 bits, and the length of options */
	__u8 flags;
	__be16 protocol; /* an EtherType */
	__be32 vni;	 /* and a reserved byte */
};

_Static_assert(sizeof(struct geneve) == 16, "geneve");

enum geneve_number {
	GENEVE_PORT = 6081,
	/* Tells these packets from those of other users of the port: "TDM". */
	GENEVE_VNI = 0x54444d,
	/* Source ports begin here: ephemeral ones (RFC 6335). */
	GENEVE_FIRST_SPORT = 0xc000,
};
BTF_EMIT(geneve_number);

/* By which routers and network cards spread flows over paths and queues; the
 * upper bits depend on all of the key. */
static __always_inline __u32 flow_hash(const struct flow_key *k)
{
	__u32 hash = k->src[0] ^ k->src[1] ^ k->src[2] ^ k->src[3];

	hash ^= (__u32)k->sport << 16 | k->dport;
	return hash * 0x9e3779b1;
}

static __always_inline __be16 geneve_sport(const struct flow_key *k)
{
	return bpf_htons(GENEVE_FIRST_SPORT | flow_hash(k) >> 18);
}

/* The header before the packet of a flow; len includes it. */
static __always_inline void make_geneve(struct geneve *g,
					const struct flow_key *k,
					__be16 protocol, __u32 len)
{
	g->sport = geneve_sport(k);
	g->dport = bpf_htons(GENEVE_PORT);
	g->len = bpf_htons(len);
	g->check = 0;
	g->version = 0;
	g->flags = 0;
	g->protocol = protocol;
	g->vni = bpf_htonl(GENEVE_VNI << 8);
}

/* Whether there is such a header at an offset, before a packet of a protocol.
 */
static __always_inline bool is_geneve(CONTEXT *ctx, __u32 offset,
				      __be16 protocol)
{
	struct geneve g;

	return load(ctx, offset, &g, sizeof(g)) &&
	       g.dport == bpf_htons(GENEVE_PORT) && !g.version &&
	       g.protocol == protocol && g.vni == bpf_htonl(GENEVE_VNI << 8);
}

#endif
