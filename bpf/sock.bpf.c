// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Socket load balancing: the address a program dials is translated once, when
 * it connects (or sends, where it never connects), and translated back in the
 * two places where it could see the difference: getpeername() and the source
 * of a received datagram. No packet is ever touched.
 */
#include <linux/bpf.h>
#include <linux/errno.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "frontend.h"
#include "lb_config.h"
#include "lb_maps.h"
#include "lb_types.h"
#include "node.h"
#include "select.h"
#include "udp_peer.h"

char __license[] SEC("license") = "Dual BSD/GPL";

/* What a connect or sendmsg program returns to the kernel. */
#define DENY 0
#define PROCEED 1

#define AF_INET 2

/* An MPTCP socket connects its TCP subflows under its own protocol number. */
#define PROTO_MPTCP 262

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
	if (is_v4(p->addr)) {
		p->addr[3] = bpf_htonl(INADDR_LOOPBACK);
	} else {
		p->addr[0] = p->addr[1] = p->addr[2] = 0;
		p->addr[3] = bpf_htonl(1);
	}
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
	copy_addr(key.addr, dest->addr);
	key.port = dest->port;
	__builtin_memcpy(value.vip, dest->vip, sizeof(value.vip));
	value.vip_port = dest->vip_port;
	value.service = dest->service;
	value.guarded = dest->guarded;
	udp_peer_update(&key, &value);
	old->many = 1;
}

/*
 * The frontend of an address: that of exactly this one, or a NodePort. At its
 * own loopback addresses, and at the unspecified one, which stands for them,
 * this host alone reaches NodePorts.
 */
static __always_inline enum frontend_result
frontend_of(const struct frontend_key *dialled, __u64 netns,
	    struct frontend_ref *fe)
{
	enum frontend_result found = frontend_lookup(dialled, fe);
	struct frontend_key key = *dialled;
	const struct node *node;

	if (found != FRONTEND_NONE)
		return found;
	if (!(local_flags(key.addr) & LOCAL_NODEPORTS)) {
		if (netns != host_netns_cookie)
			return FRONTEND_NONE;
		if (!key.addr[3] && (is_v4(key.addr) || !key.addr[2]))
			key.addr[3] = is_v4(key.addr) ?
					      bpf_htonl(INADDR_LOOPBACK) :
					      bpf_htonl(1);
		node = this_node();
		if (!node || !is_node_loopback(node, key.addr))
			return FRONTEND_NONE;
	}
	frontend_key_node(&key);
	return frontend_lookup(&key, fe);
}

/* The address that the socket was bound to, if any. */
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

enum admission {
	ADMITTED,
	SHUT_OUT,
	ASK_THE_PACKET, /* its source is not known before it is sent: tdm_guard
			 */
};

/* Who asks for a backend, and which one it gets. */
struct pick {
	__u64 netns;
	__be32 source[4]; /* if it is known yet */
	__u8 bound;	  /* it is */
	__u8 sending;	  /* without a connection */
	__u8 guarded;	  /* ranges have to ask the packet */
	__u8 pad;
	__u32 service;
	__u32 backend;
	__u32 generation;
	__be32 addr[4];
	__be16 port;
	__be16 pad2;
	__u32 pad3;
};

/* What source ranges say of a socket. */
static __always_inline enum admission admission(const struct frontend_ref *fe,
						const __be32 *vip,
						const struct pick *x)
{
	if (!(fe->flags & FRONTEND_FILTERED))
		return ADMITTED;
	if (x->bound)
		return frontend_admits(fe, vip, x->source) ? ADMITTED :
							     SHUT_OUT;
	if (x->netns == host_netns_cookie) {
		if (fe->flags & FRONTEND_HOST)
			return ADMITTED;
		/* Then the VIP itself will be the source. */
		if (fe->flags & FRONTEND_SELF && local_flags(vip))
			return ADMITTED;
		return SHUT_OUT;
	}
	if (fe->flags & FRONTEND_ALL_PODS)
		return ADMITTED;
	return fe->flags & FRONTEND_SOME_PODS ? ASK_THE_PACKET : SHUT_OUT;
}

enum picked {
	PICKED,
	PICKED_AGAIN, /* it goes on with what it has */
	PICKED_REJECT,
	PICKED_DROP,
	PICKED_RACED,	 /* what was read does not belong together */
	PICKED_NONE,	 /* no frontend has that address and port */
	PICKED_NOT_OURS, /* the namespace opted out */
};

/*
 * Picks the backend for a socket, once. last is what it has got before, if
 * anything: an unconnected socket that keeps sending to one service address
 * stays with its backend while that is eligible, as it would under netfilter's
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
	switch (frontend_of(&key, x->netns, &fe)) {
	case FRONTEND_NONE:
		return PICKED_NONE;
	case FRONTEND_RACED:
		return left_alone(x->netns) ? PICKED_NOT_OURS : PICKED_RACED;
	case FRONTEND_FOUND:
		break;
	}
	if (left_alone(x->netns))
		return PICKED_NOT_OURS;
	x->service = fe.service;
	admitted = admission(&fe, key.addr, x);
	if (admitted == SHUT_OUT)
		return PICKED_DROP;
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

/* Nobody serves this address and port. */
static __always_inline int forward_none(struct bpf_sock_addr *ctx,
					struct peer *p,
					const struct sock_dest *old,
					bool connecting, __u64 netns)
{
	if (is_unserved(p->addr) && !local_flags(p->addr) &&
	    !left_alone(netns)) {
		count(0, SELECT_REJECT, 0);
		return fail(p, true);
	}
	/* Its peer is what it dialled from now on. */
	if (connecting && old)
		bpf_sk_storage_delete(&tdm_sock, ctx->sk);
	return PROCEED;
}

/*
 * What was read may not belong together because user space is changing it; then
 * all is read again, from the frontend on. Once is enough but for a writer that
 * publishes faster than we read.
 */
#define FORWARD_ATTEMPTS 4

/* Translates *p, which a socket is about to connect or send to. */
static __always_inline int forward(struct bpf_sock_addr *ctx, struct peer *p,
				   bool connecting)
{
	struct frontend_key key = { .scope = SCOPE_ADDRESS };
	struct pick x = {};
	struct bpf_sock *sk = ctx->sk;
	struct sock_dest *old;
	int picked = PICKED_RACED;

	key.proto = l4_proto(ctx);
	if (!key.proto)
		return PROCEED;
	copy_addr(key.addr, p->addr);
	key.port = p->port;
	old = dest_of(sk);
	x.netns = bpf_get_netns_cookie(ctx);
	x.bound = bound_to(sk, x.source);
	x.sending = !connecting;

	for (int i = 0; i < FORWARD_ATTEMPTS && picked == PICKED_RACED; i++)
		picked = pick(&key, old, &x);
	switch (picked) {
	case PICKED_NONE:
		return forward_none(ctx, p, old, connecting, x.netns);
	case PICKED_NOT_OURS:
		return PROCEED;
	case PICKED_AGAIN:
		copy_addr(p->addr, x.addr);
		p->port = x.port;
		return PROCEED;
	case PICKED:
		break;
	case PICKED_DROP:
		count(x.service, SELECT_DROP, 0);
		return fail(p, false);
	default:
		count(x.service,
		      picked == PICKED_REJECT ? SELECT_REJECT : SELECT_RACED,
		      0);
		return fail(p, true);
	}
	count(x.service, SELECT_OK, x.backend);

	struct sock_dest dest = {
		.vip_port = p->port,
		.port = x.port,
		.service = x.service,
		.backend = x.backend,
		.generation = x.generation,
		.connected = connecting,
		.proto = key.proto,
		.guarded = x.guarded,
	};
	copy_addr(dest.vip, p->addr);
	copy_addr(dest.addr, x.addr);
	copy_addr(p->addr, dest.addr);
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

/*
 * A host process must not listen where NodePorts are served: it would get
 * nothing of what is sent there. The kernel asks after an explicit bind();
 * who leaves the port to the kernel is not asked.
 */
static __always_inline int may_bind(struct bpf_sock *sk, const __be32 *addr,
				    bool any)
{
	struct frontend_key key = { .port = bpf_htons(sk->src_port),
				    .proto = sk->protocol };
	struct frontend_ref fe;

	if (!protect_node_ports ||
	    bpf_get_netns_cookie(sk) != host_netns_cookie)
		return PROCEED;
	if (!any && !(local_flags(addr) & LOCAL_NODEPORTS))
		return PROCEED;
	copy_addr(key.addr, addr);
	frontend_key_node(&key);
	if (frontend_lookup(&key, &fe) == FRONTEND_NONE)
		return PROCEED;
	if (have_set_retval)
		bpf_set_retval(-EADDRINUSE);
	return DENY;
}

SEC("cgroup/post_bind4")
int tdm_post_bind4(struct bpf_sock *sk)
{
	__be32 addr[4];

	set_v4(addr, sk->src_ip4);
	return may_bind(sk, addr, !addr[3]);
}

SEC("cgroup/post_bind6")
int tdm_post_bind6(struct bpf_sock *sk)
{
	__be32 addr[4] = { sk->src_ip6[0], sk->src_ip6[1], sk->src_ip6[2],
			   sk->src_ip6[3] };
	bool any = !(addr[0] | addr[1] | addr[2] | addr[3]);

	if (may_bind(sk, addr, any) == DENY)
		return DENY;
	if (!any)
		return PROCEED;
	/* It may well be for IPv4 too; whether it is cannot be seen here. */
	set_v4(addr, 0);
	return may_bind(sk, addr, true);
}

/* Where a packet that a socket sends goes, and with which source. */
static __always_inline bool read_packet(struct __sk_buff *skb, __be32 *source,
					struct peer *to)
{
	struct ipv6hdr ip6;
	struct iphdr ip;
	__be16 ports[2];
	__u32 l4;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (bpf_skb_load_bytes(skb, 0, &ip, sizeof(ip)))
			return false;
		set_v4(source, ip.saddr);
		set_v4(to->addr, ip.daddr);
		l4 = ip.ihl * 4;
	} else {
		if (bpf_skb_load_bytes(skb, 0, &ip6, sizeof(ip6)))
			return false;
		__builtin_memcpy(source, &ip6.saddr, sizeof(ip6.saddr));
		__builtin_memcpy(to->addr, &ip6.daddr, sizeof(ip6.daddr));
		l4 = sizeof(ip6);
	}
	if (bpf_skb_load_bytes(skb, l4, ports, sizeof(ports)))
		return false;
	to->port = ports[1];
	return true;
}

/*
 * Asks the source ranges for those sockets that were translated without, since
 * nobody knew their address: of pods, where the ranges let some of them in.
 * Attached only while there are such ranges, as it sees every packet that
 * sockets send.
 */
SEC("cgroup_skb/egress")
int tdm_guard(struct __sk_buff *skb)
{
	struct frontend_ref fe = { .flags = FRONTEND_FILTERED };
	struct udp_peer_key key = {};
	struct udp_peer further;
	struct sock_dest *dest;
	struct bpf_sock *sk = skb->sk;
	__be32 source[4];
	struct peer to;

	if (sk)
		sk = bpf_sk_fullsock(sk);
	dest = dest_of(sk);
	if (!dest || (!dest->guarded && !dest->many) ||
	    !read_packet(skb, source, &to))
		return PROCEED;
	if (same(dest->addr, dest->port, to.addr, to.port)) {
		if (!dest->guarded)
			return PROCEED;
		fe.service = dest->service;
	} else {
		if (!dest->many)
			return PROCEED;
		key.cookie = bpf_get_socket_cookie(skb);
		copy_addr(key.addr, to.addr);
		key.port = to.port;
		if (!udp_peer_lookup(&key, &further) || !further.guarded)
			return PROCEED;
		fe.service = further.service;
	}
	if (frontend_admits(&fe, to.addr, source))
		return PROCEED;
	count(fe.service, SELECT_DROP, 0);
	return DENY;
}
