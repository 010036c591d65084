// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Socket load balancing. The destination is translated once: when a socket
 * connects, or when it sends without a connection. It is translated back where
 * the process could see the difference: in getpeername(), and in the source of
 * a received datagram. No packet is changed.
 */
#include <linux/bpf.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "backend.h"
#include "clock.h"
#include "lb_maps.h"
#include "node.h"
#include "service_stats.h"
#include "sock_addr.h"
#include "sock_bind.h"
#include "sock_dest.h"
#include "sock_guard.h"
#include "sock_pick.h"
#include "sock_refuse.h"
#include "sock_reply.h"
#include "sock_signal.h"
#include "sock_successor.h"
#include "udp_peer.h"

char __license[] SEC("license") = "Dual BSD/GPL";

/* A destination without a frontend goes on as it is, but unallocated
 * ClusterIPs are rejected. */
static __always_inline int without_frontend(struct bpf_sock_addr *ctx,
					    struct peer *p,
					    const struct sock_dest *old,
					    bool connecting, __u64 netns)
{
	if (is_unserved(p->addr) && !local_flags(p->addr) &&
	    !is_opted_out(netns)) {
		count_connection(0, SELECT_REJECT, 0, false);
		return refuse(p, l4_proto(ctx), SELECT_REJECT);
	}
	forget(ctx->sk, old, connecting);
	return PROCEED;
}

/*
 * A read is inconsistent if user space changes the tables meanwhile; then
 * everything is read again, from the frontend on. One retry is enough unless
 * updates are published faster than they can be read.
 */
#define PICK_ATTEMPTS 4

/* Translates the destination of a socket that connects or sends: frontend to
 * backend. */
static __always_inline int translate(struct bpf_sock_addr *ctx, struct peer *p,
				     bool connecting)
{
	struct frontend_key key = { .scope = SCOPE_ADDRESS };
	struct pick x = {};
	struct bpf_sock *sk = ctx->sk;
	struct sock_dest *old;
	int picked = PICKED_RACED;
	enum select_result failed;

	if (left_pods && left_host)
		return PROCEED;
	key.proto = l4_proto(ctx);
	if (!key.proto)
		return PROCEED;
	old = dest_of(sk);
	if (sockets_yield(ctx)) {
		forget(sk, old, connecting);
		return PROCEED;
	}
	copy_addr(key.addr, p->addr);
	key.port = p->port;
	x.netns = bpf_get_netns_cookie(ctx);
	x.bound = bound_to(sk, x.source);
	x.sending = !connecting;

	for (int i = 0; i < PICK_ATTEMPTS && picked == PICKED_RACED; i++)
		picked = pick(&key, old, &x);
	if (!connecting && x.node_port && is_udp_client(ctx, p))
		return PROCEED;
	switch (picked) {
	case PICKED_NONE:
		return without_frontend(ctx, p, old, connecting, x.netns);
	case PICKED_NOT_OURS:
		return PROCEED;
	case PICKED_AGAIN:
		/* The ranges may be newer than what was recorded. */
		if (old && x.guarded)
			old->guarded = true;
		copy_addr(p->addr, x.addr);
		p->port = x.port;
		return PROCEED;
	case PICKED:
		break;
	case PICKED_DROP:
	case PICKED_SHUT_OUT:
		count_connection(x.service, SELECT_DROP, 0, false);
		return refuse(p, key.proto,
			      picked == PICKED_DROP ? SELECT_DROP :
						      SELECT_REJECT);
	default:
		failed = picked == PICKED_REJECT ? SELECT_REJECT : SELECT_RACED;
		count_connection(x.service, failed, 0, false);
		return refuse(p, key.proto, failed);
	}

	struct sock_dest dest = {
		.vip_port = p->port,
		.port = x.port,
		.service = x.service,
		.backend = x.backend,
		.generation = x.generation,
		.connected = connecting,
		.proto = key.proto,
		.guarded = x.guarded,
		.created = now_s(),
	};
	copy_addr(dest.vip, p->addr);
	copy_addr(dest.addr, x.addr);
	/* A socket may connect again, and forget what it dialled before. */
	if (!remember_tcp && key.proto == IPPROTO_TCP && !x.guarded)
		forget(sk, old, connecting);
	/* Without storage tdm_guard could not check the packets. */
	else if (!remember(ctx, sk, old, &dest) && x.guarded) {
		count_connection(x.service, SELECT_DROP, 0, false);
		return refuse(p, key.proto, SELECT_DROP);
	}
	count_connection(x.service, SELECT_OK, x.backend, false);
	copy_addr(p->addr, dest.addr);
	p->port = dest.port;
	return PROCEED;
}

/* Translates the peer that a socket is told, backend to frontend. Returns false
 * if it is none. */
static __always_inline bool translate_back(struct bpf_sock_addr *ctx,
					   struct peer *p)
{
	struct sock_dest *dest = dest_of(ctx->sk);
	struct udp_peer_key key = {};
	struct udp_peer peer;

	if (!dest)
		return false;
	if (same(dest->addr, dest->port, p->addr, p->port)) {
		__builtin_memcpy(p->addr, dest->vip, sizeof(p->addr));
		p->port = dest->vip_port;
		return true;
	}
	if (!dest->many)
		return false;
	key.cookie = bpf_get_socket_cookie(ctx);
	__builtin_memcpy(key.addr, p->addr, sizeof(key.addr));
	key.port = p->port;
	if (!udp_peer_lookup(&key, &peer))
		return false;
	__builtin_memcpy(p->addr, peer.vip, sizeof(p->addr));
	p->port = peer.vip_port;
	return true;
}

static __always_inline int translate4(struct bpf_sock_addr *ctx,
				      bool connecting)
{
	struct peer p;
	int ret;

	read4(ctx, &p);
	ret = translate(ctx, &p, connecting);
	if (ret == PROCEED)
		write4(ctx, &p);
	return ret;
}

static __always_inline int translate6(struct bpf_sock_addr *ctx,
				      bool connecting)
{
	struct peer p;
	int ret;

	read6(ctx, &p);
	ret = translate(ctx, &p, connecting);
	if (ret == PROCEED)
		write6(ctx, &p);
	return ret;
}

static __always_inline int translate_back4(struct bpf_sock_addr *ctx,
					   bool receiving)
{
	struct peer p;

	read4(ctx, &p);
	if (translate_back(ctx, &p))
		write4(ctx, &p);
	else if (receiving)
		note_udp_client(ctx, &p);
	return PROCEED;
}

static __always_inline int translate_back6(struct bpf_sock_addr *ctx,
					   bool receiving)
{
	struct peer p;

	read6(ctx, &p);
	if (translate_back(ctx, &p))
		write6(ctx, &p);
	else if (receiving)
		note_udp_client(ctx, &p);
	return PROCEED;
}

SEC("cgroup/connect4")
int tdm_connect4(struct bpf_sock_addr *ctx)
{
	return translate4(ctx, true);
}

SEC("cgroup/connect6")
int tdm_connect6(struct bpf_sock_addr *ctx)
{
	return translate6(ctx, true);
}

SEC("cgroup/sendmsg4")
int tdm_sendmsg4(struct bpf_sock_addr *ctx)
{
	return translate4(ctx, false);
}

SEC("cgroup/sendmsg6")
int tdm_sendmsg6(struct bpf_sock_addr *ctx)
{
	return translate6(ctx, false);
}

SEC("cgroup/recvmsg4")
int tdm_recvmsg4(struct bpf_sock_addr *ctx)
{
	return translate_back4(ctx, true);
}

SEC("cgroup/recvmsg6")
int tdm_recvmsg6(struct bpf_sock_addr *ctx)
{
	return translate_back6(ctx, true);
}

SEC("cgroup/getpeername4")
int tdm_getpeer4(struct bpf_sock_addr *ctx)
{
	return translate_back4(ctx, false);
}

SEC("cgroup/getpeername6")
int tdm_getpeer6(struct bpf_sock_addr *ctx)
{
	return translate_back6(ctx, false);
}

SEC("cgroup/post_bind4")
int tdm_post_bind4(struct bpf_sock *sk)
{
	__be32 addr[4];

	set_v4(addr, sk->src_ip4);
	if (may_bind(sk, addr, !addr[3]) == DENY)
		return DENY;
	note_bind(sk, addr);
	tell_bound(sk);
	return PROCEED;
}

SEC("cgroup/post_bind6")
int tdm_post_bind6(struct bpf_sock *sk)
{
	__be32 addr[4] = { sk->src_ip6[0], sk->src_ip6[1], sk->src_ip6[2],
			   sk->src_ip6[3] };
	bool any = !(addr[0] | addr[1] | addr[2] | addr[3]);
	__be32 v4[4];

	if (may_bind(sk, addr, any) == DENY)
		return DENY;
	/* It may also be for IPv4, which cannot be seen here. */
	set_v4(v4, 0);
	if (any && may_bind(sk, v4, true) == DENY)
		return DENY;
	note_bind(sk, addr);
	tell_bound(sk);
	return PROCEED;
}

/* Attached only while some frontend has source ranges, since it runs for every
 * packet that a socket sends. */
SEC("cgroup_skb/egress")
int tdm_guard(struct __sk_buff *skb)
{
	return guard(skb);
}

/* Watches TCP connections of sockets to Services. Replies to the kernel are
 * left to other programs: 0 means the kernel's own values. */
SEC("sockops")
int tdm_signal(struct bpf_sock_ops *ctx)
{
	switch (ctx->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		if (dest_of(ctx->sk))
			bpf_sock_ops_cb_flags_set(
				ctx, ctx->bpf_sock_ops_cb_flags |
					     BPF_SOCK_OPS_STATE_CB_FLAG);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		signal_established(ctx);
		break;
	case BPF_SOCK_OPS_STATE_CB:
		if (ctx->args[1] == BPF_TCP_CLOSE)
			signal_ended(ctx);
		break;
	}
	return 1;
}
