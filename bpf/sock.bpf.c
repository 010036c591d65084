// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Socket load balancing: the address a program dials is translated once, when
 * it connects (or sends, where it never connects), and translated back in the
 * two places where it could see the difference: getpeername() and the source
 * of a received datagram. No packet is ever touched.
 */
#include <linux/bpf.h>
#include <linux/errno.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "frontend.h"
#include "lb_config.h"
#include "lb_maps.h"
#include "lb_types.h"
#include "select.h"
#include "udp_peer.h"

char __license[] SEC("license") = "Dual BSD/GPL";

/* What a connect or sendmsg program returns to the kernel. */
#define DENY 0
#define PROCEED 1

/* An MPTCP socket connects its TCP subflows under its own protocol number. */
#define PROTO_MPTCP 262

static const __be32 v4_prefix = bpf_htonl(0xffff);

struct peer {
	__be32 addr[4];
	__be16 port;
};

/*
 * The context's address, where user_ip4 may be read by *4 programs only and
 * user_ip6 by *6 programs only: hence two readers, two writers, and nothing
 * else in this file that knows about families.
 */
static __always_inline void read4(const struct bpf_sock_addr *ctx,
				  struct peer *p)
{
	p->addr[0] = 0;
	p->addr[1] = 0;
	p->addr[2] = v4_prefix;
	p->addr[3] = ctx->user_ip4;
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

static __always_inline bool is_v4(const struct peer *p)
{
	return !p->addr[0] && !p->addr[1] && p->addr[2] == v4_prefix;
}

static __always_inline bool same(const __be32 *a, __be16 a_port,
				 const __be32 *b, __be16 b_port)
{
	return a_port == b_port && a[3] == b[3] && a[2] == b[2] &&
	       a[1] == b[1] && a[0] == b[0];
}

/* IPPROTO_TCP or IPPROTO_UDP, or 0 for what no Service can be. */
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

static __always_inline struct sock_dest *dest_of(struct bpf_sock *sk)
{
	if (!sk)
		return NULL;
	return bpf_sk_storage_get(&tdm_sock, sk, NULL, 0);
}

/*
 * No backend. The caller is told at once: a packet to the service address
 * would find nobody who could answer it. Rejecting means ECONNREFUSED. A drop
 * fails with EPERM, as a local socket sees a packet that a firewall dropped.
 * Before Linux 6.1 the errno cannot be chosen, so a rejected connection is
 * sent to a port where nobody can listen.
 */
static __always_inline int fail(struct peer *p, bool reject)
{
	if (!reject)
		return DENY;
	if (have_set_retval) {
		bpf_set_retval(-ECONNREFUSED);
		return DENY;
	}
	p->addr[3] = is_v4(p) ? bpf_htonl(INADDR_LOOPBACK) : bpf_htonl(1);
	if (p->addr[2] != v4_prefix)
		p->addr[0] = p->addr[1] = p->addr[2] = 0;
	p->port = 0;
	return PROCEED;
}

/* Opted out: these sockets want to see their packets go to the VIP. */
static __always_inline bool left_alone(__u64 netns)
{
	if (host_namespace_only && netns != host_netns_cookie)
		return true;
	return bpf_map_lookup_elem(&tdm_optout, &netns) != NULL;
}

static __always_inline void count(__u32 service, enum select_result result,
				  __u32 backend)
{
	struct service_stats *s = bpf_map_lookup_elem(&tdm_svc_stats, &service);
	__u64 *b;

	if (!s)
		return;
	switch (result) {
	case SELECT_OK:
		__sync_fetch_and_add(&s->connections, 1);
		b = bpf_map_lookup_elem(&tdm_be_stats, &backend);
		if (b)
			__sync_fetch_and_add(b, 1);
		return;
	case SELECT_REJECT:
		__sync_fetch_and_add(&s->rejected, 1);
		return;
	case SELECT_DROP:
		__sync_fetch_and_add(&s->dropped, 1);
		return;
	case SELECT_RACED:
		__sync_fetch_and_add(&s->raced, 1);
		return;
	}
}

/*
 * An unconnected socket that keeps sending to one service address stays with
 * its backend while that is eligible, as it would under netfilter's conntrack.
 */
static __always_inline bool sticky(const struct sock_dest *dest,
				   const struct frontend_ref *fe,
				   struct peer *p)
{
	struct backend *be;

	if (!dest || !same(dest->vip, dest->vip_port, p->addr, p->port))
		return false;
	be = backend_of(dest->backend, dest->generation, fe->service);
	if (!be || !is_member(be, fe->set))
		return false;
	__builtin_memcpy(p->addr, be->addr, sizeof(p->addr));
	p->port = be->port;
	return true;
}

/*
 * Remembers what dest says of the socket. Only an unconnected socket can come
 * here for a second service address while replies of the first may still
 * arrive; its further peers go to the LRU.
 */
static __always_inline void remember(struct bpf_sock_addr *ctx,
				     struct bpf_sock *sk, struct sock_dest *old,
				     struct sock_dest *dest)
{
	struct udp_peer_key key = {};
	struct udp_peer value = {};

	if (!old) {
		if (!sk)
			return;
		old = bpf_sk_storage_get(&tdm_sock, sk, dest,
					 BPF_SK_STORAGE_GET_F_CREATE);
		if (!old)
			return;
	}
	/*
	 * A reply of a backend left behind is no longer expected. Where two
	 * service addresses led to the same backend, replies cannot be told
	 * apart: they are taken for those of the newest request.
	 */
	if (dest->connected ||
	    same(old->vip, old->vip_port, dest->vip, dest->vip_port) ||
	    same(old->addr, old->port, dest->addr, dest->port)) {
		dest->many = dest->connected ? 0 : old->many;
		*old = *dest;
		return;
	}
	key.cookie = bpf_get_socket_cookie(ctx);
	__builtin_memcpy(key.addr, dest->addr, sizeof(key.addr));
	key.port = dest->port;
	__builtin_memcpy(value.vip, dest->vip, sizeof(value.vip));
	value.vip_port = dest->vip_port;
	udp_peer_update(&key, &value);
	old->many = 1;
}

/*
 * What was read may not belong together because user space is changing it; then
 * all is read again, from the frontend on. Once is enough but for a writer that
 * publishes faster than we read. The verifier walks through every attempt:
 * twice as many would take it ten times as long.
 */
#define FORWARD_ATTEMPTS 4

/* Translates *p, which a socket is about to connect or send to. */
static __always_inline int forward(struct bpf_sock_addr *ctx, struct peer *p,
				   bool connecting)
{
	struct frontend_key key = { .scope = SCOPE_INTERNAL };
	enum select_result result = SELECT_RACED;
	struct bpf_sock *sk = ctx->sk;
	__u32 service = 0; /* of a frontend that could not be read */
	struct affinity chosen;
	struct frontend_ref fe;
	struct backend *be = NULL;
	struct sock_dest *old;
	__u64 netns;

	key.proto = l4_proto(ctx);
	if (!key.proto)
		return PROCEED;
	__builtin_memcpy(key.addr, p->addr, sizeof(key.addr));
	key.port = p->port;
	old = dest_of(sk);

	for (int i = 0; i < FORWARD_ATTEMPTS; i++) {
		enum frontend_result found = frontend_lookup(&key, &fe);

		if (found == FRONTEND_NONE) {
			/* Its peer is what it dialled from now on. */
			if (connecting && old)
				bpf_sk_storage_delete(&tdm_sock, sk);
			return PROCEED;
		}
		netns = bpf_get_netns_cookie(ctx);
		if (left_alone(netns))
			return PROCEED;
		if (found == FRONTEND_RACED)
			continue;
		if (!connecting && sticky(old, &fe, p))
			return PROCEED;
		service = fe.service;
		be = select_backend(&fe, netns, &chosen, &result);
		if (result != SELECT_RACED)
			break;
	}
	count(service, result, be ? chosen.backend : 0);
	if (!be)
		return fail(p, result != SELECT_DROP);

	struct sock_dest dest = {
		.vip_port = p->port,
		.port = be->port,
		.service = fe.service,
		.backend = chosen.backend,
		.generation = chosen.generation,
		.connected = connecting,
		.proto = key.proto,
	};
	__builtin_memcpy(dest.vip, p->addr, sizeof(dest.vip));
	__builtin_memcpy(dest.addr, be->addr, sizeof(dest.addr));
	__builtin_memcpy(p->addr, dest.addr, sizeof(p->addr));
	p->port = dest.port;
	remember(ctx, sk, old, &dest);
	return PROCEED;
}

/* Translates *p, the peer a socket is about to be told, back. */
static __always_inline void backward(struct bpf_sock_addr *ctx, struct peer *p)
{
	struct sock_dest *dest = dest_of(ctx->sk);
	struct udp_peer_key key = {};
	struct udp_peer peer;

	if (!dest)
		return;
	if (same(dest->addr, dest->port, p->addr, p->port)) {
		__builtin_memcpy(p->addr, dest->vip, sizeof(p->addr));
		p->port = dest->vip_port;
		return;
	}
	if (!dest->many)
		return;
	key.cookie = bpf_get_socket_cookie(ctx);
	__builtin_memcpy(key.addr, p->addr, sizeof(key.addr));
	key.port = p->port;
	if (!udp_peer_lookup(&key, &peer))
		return;
	__builtin_memcpy(p->addr, peer.vip, sizeof(p->addr));
	p->port = peer.vip_port;
}

static __always_inline int forward4(struct bpf_sock_addr *ctx, bool connecting)
{
	struct peer p;
	int ret;

	read4(ctx, &p);
	ret = forward(ctx, &p, connecting);
	if (ret == PROCEED)
		write4(ctx, &p);
	return ret;
}

static __always_inline int forward6(struct bpf_sock_addr *ctx, bool connecting)
{
	struct peer p;
	int ret;

	read6(ctx, &p);
	ret = forward(ctx, &p, connecting);
	if (ret == PROCEED)
		write6(ctx, &p);
	return ret;
}

static __always_inline int backward4(struct bpf_sock_addr *ctx)
{
	struct peer p;

	read4(ctx, &p);
	backward(ctx, &p);
	write4(ctx, &p);
	return PROCEED;
}

static __always_inline int backward6(struct bpf_sock_addr *ctx)
{
	struct peer p;

	read6(ctx, &p);
	backward(ctx, &p);
	write6(ctx, &p);
	return PROCEED;
}

SEC("cgroup/connect4")
int tdm_connect4(struct bpf_sock_addr *ctx)
{
	return forward4(ctx, true);
}

SEC("cgroup/connect6")
int tdm_connect6(struct bpf_sock_addr *ctx)
{
	return forward6(ctx, true);
}

SEC("cgroup/sendmsg4")
int tdm_sendmsg4(struct bpf_sock_addr *ctx)
{
	return forward4(ctx, false);
}

SEC("cgroup/sendmsg6")
int tdm_sendmsg6(struct bpf_sock_addr *ctx)
{
	return forward6(ctx, false);
}

SEC("cgroup/recvmsg4")
int tdm_recvmsg4(struct bpf_sock_addr *ctx)
{
	return backward4(ctx);
}

SEC("cgroup/recvmsg6")
int tdm_recvmsg6(struct bpf_sock_addr *ctx)
{
	return backward6(ctx);
}

SEC("cgroup/getpeername4")
int tdm_getpeer4(struct bpf_sock_addr *ctx)
{
	return backward4(ctx);
}

SEC("cgroup/getpeername6")
int tdm_getpeer6(struct bpf_sock_addr *ctx)
{
	return backward6(ctx);
}
