/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SOCK_ADDR_H
#define TANDEM_SOCK_ADDR_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"

/* An MPTCP socket connects its TCP subflows under its own protocol number. */
#define PROTO_MPTCP 262

/* The address and port that a socket talks to. */
struct peer {
	__be32 addr[4];
	__be16 port;
};

/*
 * Only *4 programs may read user_ip4 and only *6 programs user_ip6. Hence two
 * readers and two writers; all other code serves both families.
 */
static __always_inline void read4(const struct bpf_sock_addr *ctx,
				  struct peer *p)
{
	set_v4(p->addr, ctx->user_ip4);
	p->port = (__be16)ctx->user_port;
}

static __always_inline void write4(struct bpf_sock_addr *ctx,
				   const struct peer *p)
{
	ctx->user_ip4 = p->addr[3];
	ctx->user_port = p->port;
}

static __always_inline void read6(const struct bpf_sock_addr *ctx,
				  struct peer *p)
{
	p->addr[0] = ctx->user_ip6[0];
	p->addr[1] = ctx->user_ip6[1];
	p->addr[2] = ctx->user_ip6[2];
	p->addr[3] = ctx->user_ip6[3];
	p->port = (__be16)ctx->user_port;
}

static __always_inline void write6(struct bpf_sock_addr *ctx,
				   const struct peer *p)
{
	ctx->user_ip6[0] = p->addr[0];
	ctx->user_ip6[1] = p->addr[1];
	ctx->user_ip6[2] = p->addr[2];
	ctx->user_ip6[3] = p->addr[3];
	ctx->user_port = p->port;
}

static __always_inline bool same(const __be32 *a, __be16 a_port,
				 const __be32 *b, __be16 b_port)
{
	return a_port == b_port && same_addr(a, b);
}

/* IPPROTO_TCP or IPPROTO_UDP; 0 for protocols that are not translated. */
static __always_inline __u8 l4_proto(const struct bpf_sock_addr *ctx)
{
	switch (ctx->protocol) {
	case IPPROTO_TCP:
	case PROTO_MPTCP:
		return IPPROTO_TCP;
	case IPPROTO_UDP:
		return IPPROTO_UDP;
	}
	return 0;
}

#endif
