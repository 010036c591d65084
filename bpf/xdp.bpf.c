// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Packets of established connections from outside to backends on other nodes,
 * and back, before the kernel's stack has them; and the first packets of TCP
 * connections that are forwarded by direct server return, or dropped.
 * Everything else passes unmodified to the programs of tc.bpf.c on the same
 * device: what else has no flow yet, local backends, fragments, options, ICMP,
 * packets that are too big, and what has no route with a known neighbour to the
 * same device, or to another uplink that sends what XDP redirects.
 */
#define TANDEM_XDP

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "choice.h"
#include "clock.h"
#include "context.h"
#include "csum.h"
#include "failure.h"
#include "flow_create.h"
#include "flow_index.h"
#include "flow_life.h"
#include "flow_stale.h"
#include "flow_track.h"
#include "geneve.h"
#include "global.h"
#include "l4.h"
#include "length.h"
#include "node.h"
#include "option.h"
#include "packet.h"
#include "plan.h"
#include "reasons.h"
#include "route.h"
#include "spread.h"
#include "tc_config.h"
#include "uplink.h"
#include "verdict.h"
#include "wrapper.h"

char __license[] SEC("license") = "Dual BSD/GPL";

#define IP_FRAGMENTED 0x3fff

struct macs {
	__u16 words[ETH_ALEN]; /* destination and source */
};

/* Where the packets of a flow go to. */
struct xdp_hop {
	__u64 flow;   /* of which flow, and which direction; 0 for none */
	__u32 tick;   /* packet.tick when the route was looked up */
	__u32 device; /* where the flow's packets come in: the driver's */
	__u32 via;    /* and the one that routes name */
	__u16 mtu;    /* of the route, in bytes */
	__u16 own[ETH_ALEN / 2]; /* address of the device */
	struct macs macs;
	__u32 out; /* device where they go out */
};

#define XDP_HOPS 1024 /* a power of two */

/*
 * The next hops of flows with their link-layer addresses, kept for a tick of
 * the kernel's clock as those in tdm_next_hop are.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct xdp_hop);
	__uint(max_entries, XDP_HOPS);
} tdm_xdp_hop SEC(".maps");

#define NEIGHBOURS 64 /* a power of two */

/*
 * Last byte of a neighbour's address -> the second in which a packet for it was
 * last left to the stack, which thereby keeps probing the neighbour (NUD). It
 * does not for packets that XDP sends.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, NEIGHBOURS);
} tdm_xdp_neigh SEC(".maps");

/* Whether the stack has had a packet for a neighbour in this second. */
static __always_inline bool is_confirmed(const __u8 *mac)
{
	__u32 index = mac[ETH_ALEN - 1] & (NEIGHBOURS - 1), now = now_s();
	__u32 *last = bpf_map_lookup_elem(&tdm_xdp_neigh, &index);

	if (!last || *last == now)
		return last;
	*last = now;
	return false;
}

/* Reads TCP and UDP ports, and what else flow_account() needs. */
static __always_inline bool read_l4(struct packet *p, void *l4, void *end)
{
	struct tcphdr *tcp = l4;
	struct udphdr *udp = l4;
	__u32 room = p->l3_len - (p->l4 - p->l3);

	if (p->key.proto == IPPROTO_UDP) {
		if ((void *)(udp + 1) > end || room < sizeof(*udp))
			return false;
		p->key.sport = udp->source;
		p->key.dport = udp->dest;
		return true;
	}
	if (p->key.proto != IPPROTO_TCP || (void *)(tcp + 1) > end ||
	    room < sizeof(*tcp))
		return false;
	p->key.sport = tcp->source;
	p->key.dport = tcp->dest;
	p->tcp_flags = ((__u8 *)tcp)[13];
	p->l4_len = tcp->doff * 4;
	return p->l4_len >= sizeof(*tcp) && p->l4_len <= room;
}

/* Parses a packet without options, extension headers and fragments. */
static __always_inline bool parse_plain(struct xdp_md *ctx, struct packet *p)
{
	void *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = (void *)(long)ctx->data;
	struct ipv6hdr *v6 = (void *)(eth + 1);
	struct iphdr *v4 = (void *)(eth + 1);

	p->l3 = sizeof(*eth);
	if ((void *)(v4 + 1) > end)
		return false;
	if (eth->h_proto == bpf_htons(ETH_P_IP)) {
		if (*(__u8 *)v4 != 0x45 ||
		    v4->frag_off & bpf_htons(IP_FRAGMENTED))
			return false;
		set_v4(p->key.src, v4->saddr);
		set_v4(p->key.dst, v4->daddr);
		p->key.proto = v4->protocol;
		p->l3_len = bpf_ntohs(v4->tot_len);
		p->l4 = p->l3 + sizeof(*v4);
		p->ttl = v4->ttl;
		p->l3_check = v4->check;
	} else if (eth->h_proto == bpf_htons(ETH_P_IPV6)) {
		if ((void *)(v6 + 1) > end || v6->version != 6)
			return false;
		copy_words(p->key.src, &v6->saddr, sizeof(p->key.src));
		copy_words(p->key.dst, &v6->daddr, sizeof(p->key.dst));
		if (is_v4(p->key.src) || is_v4(p->key.dst))
			return false;
		p->v6 = true;
		p->key.proto = v6->nexthdr;
		p->l3_len = sizeof(*v6) + bpf_ntohs(v6->payload_len);
		p->l4 = p->l3 + sizeof(*v6);
		p->ttl = v6->hop_limit;
	} else {
		return false;
	}
	if (p->l3 + p->l3_len > packet_len(ctx) || p->l3_len < p->l4 - p->l3)
		return false;
	return p->v6 ? read_l4(p, v6 + 1, end) : read_l4(p, v4 + 1, end);
}

/* Whether this program can send to a device. */
static __always_inline bool can_send_to(const struct packet *p, __u32 device)
{
	const struct uplink *up;

	if (device == p->device)
		return true;
	up = uplink_of(device);
	return up && up->xdp_target;
}

/* Whether this program can send by the route that was looked up last. The
 * kernel tells the MTU only if it knows the neighbour too. */
static __always_inline bool can_send(const struct packet *p)
{
	const struct bpf_fib_lookup *fib = last_route();

	return fib && fib->mtu_result && can_send_to(p, fib->ifindex) &&
	       is_confirmed(fib->dmac);
}

/* Looks up where the packets of a flow go to. has_way: the route is the last
 * that was looked up, by which this program can send. */
static __always_inline bool find_hop(struct xdp_md *ctx, struct packet *p,
				     const struct flow_hit *hit,
				     struct xdp_hop *hop, __u64 key,
				     bool has_way)
{
	const struct uplink *up = uplink_of(ctx->ingress_ifindex);
	struct bpf_fib_lookup *fib = last_route();
	__u16 len = sent_len(ctx, p, hit->action);

	if (!fib || !up)
		return false;
	hop->flow = 0;
	p->device = up->device;
	if (!has_way &&
	    (route(ctx, p, fib, &hit->to, len, 0) != BPF_FIB_LKUP_RET_SUCCESS ||
	     !can_send(p)))
		return false;
	copy_words(hop->own, up->mac, sizeof(hop->own));
	copy_words(&hop->macs.words[0], fib->dmac, ETH_ALEN);
	copy_words(&hop->macs.words[ETH_ALEN / 2], fib->smac, ETH_ALEN);
	hop->mtu = fib->mtu_result;
	hop->tick = p->tick;
	hop->device = ctx->ingress_ifindex;
	hop->via = up->device;
	hop->out = fib->ifindex;
	hop->flow = key;
	return true;
}

/* Where a packet of a flow goes to; NULL if the stack has to decide. */
static __always_inline const struct xdp_hop *hop_of(struct xdp_md *ctx,
						    struct packet *p,
						    const struct flow_hit *hit,
						    bool has_way)
{
	const __u64 key = way_of(hit);
	__u32 index = key & (XDP_HOPS - 1);
	struct xdp_hop *hop = bpf_map_lookup_elem(&tdm_xdp_hop, &index);

	if (!hop)
		return NULL;
	if ((hop->flow != key || hop->tick != p->tick ||
	     hop->device != ctx->ingress_ifindex) &&
	    !find_hop(ctx, p, hit, hop, key, has_way))
		return NULL;
	p->device = hop->via;
	return sent_len(ctx, p, hit->action) <= hop->mtu ? hop : NULL;
}

/* Whether a frame is for this device, and not to a group or another host. */
static __always_inline bool is_own(struct xdp_md *ctx, const __u16 *own)
{
	void *end = (void *)(long)ctx->data_end;
	__u16 *to = (void *)(long)ctx->data;

	return (void *)(to + ETH_ALEN / 2) <= end && to[0] == own[0] &&
	       to[1] == own[1] && to[2] == own[2];
}

static __always_inline __u64 ttl_diff(const struct packet *p)
{
	/* TTL and protocol are one word for the checksum. */
	return (__u64)(__u16)~bpf_htons(p->ttl << 8 | p->key.proto) +
	       bpf_htons((p->ttl - 1) << 8 | p->key.proto);
}

/* Rewrites ports and checksum of what follows the IP header. */
static __always_inline bool rewrite_ports(const struct packet *p, void *l4,
					  void *end, const struct flow_key *to,
					  __s64 diff)
{
	if (p->key.proto == IPPROTO_UDP) {
		if (l4 + UDP_PART > end)
			return false;
		rewrite_l4(l4, to, diff, true, false);
		return true;
	}
	if (l4 + TCP_PART > end)
		return false;
	rewrite_l4(l4, to, diff, false, false);
	return true;
}

/* Rewrites TTL, addresses, ports and checksums. */
static __always_inline bool rewrite_headers(struct xdp_md *ctx,
					    const struct packet *p,
					    const struct flow_key *to)
{
	void *end = (void *)(long)ctx->data_end;
	void *l3 = (void *)(long)ctx->data + sizeof(struct ethhdr);
	struct ipv6hdr *v6 = l3;
	struct iphdr *v4 = l3;
	__be32 old[2], new[2];
	__s64 diff;

	if (p->v6) {
		if ((void *)(v6 + 1) > end)
			return false;
		diff = sum_diff(p->key.src, to->src, 8);
		copy_words(&v6->saddr, to->src, sizeof(v6->saddr));
		copy_words(&v6->daddr, to->dst, sizeof(v6->daddr));
		v6->hop_limit = p->ttl - 1;
		return rewrite_ports(p, v6 + 1, end, to, diff);
	}
	if ((void *)(v4 + 1) > end)
		return false;
	old[0] = p->key.src[3];
	old[1] = p->key.dst[3];
	new[0] = to->src[3];
	new[1] = to->dst[3];
	diff = sum_diff(old, new, 2);
	v4->saddr = new[0];
	v4->daddr = new[1];
	v4->ttl = p->ttl - 1;
	v4->check = ~fold((__u64)(__u16)~p->l3_check + diff + ttl_diff(p));
	return rewrite_ports(p, v4 + 1, end, to, diff);
}

/* Writes what follows the outer IP header. */
static __always_inline bool put_geneve(const struct packet *p, void *at,
				       void *end, __be16 protocol)
{
	struct geneve *g = at;

	if (dispatch != DISPATCH_GENEVE)
		return true;
	if ((void *)(g + 1) > end)
		return false;
	make_geneve(g, &p->key, protocol, p->l3_len + sizeof(*g));
	return true;
}

/* Lowers the TTL, and puts headers before the packet. */
static __always_inline bool wrap_packet(struct xdp_md *ctx,
					const struct packet *p,
					const struct flow_key *to)
{
	const int room = wrapper_len(p, ACTION_DIRECT);
	void *end = (void *)(long)ctx->data_end;
	void *l3 = (void *)(long)ctx->data + sizeof(struct ethhdr);
	struct ipv6hdr *v6 = l3;
	struct iphdr *v4 = l3;
	struct ethhdr *eth;
	__be32 first;

	if (p->v6) {
		if ((void *)(v6 + 1) > end)
			return false;
		first = *(__be32 *)v6;
		v6->hop_limit = p->ttl - 1;
	} else {
		if ((void *)(v4 + 1) > end)
			return false;
		first = v4->tos;
		v4->ttl = p->ttl - 1;
		v4->check = ~fold((__u64)(__u16)~p->l3_check + ttl_diff(p));
	}
	if (bpf_xdp_adjust_head(ctx, -room))
		return false;
	end = (void *)(long)ctx->data_end;
	eth = (void *)(long)ctx->data;
	v6 = (void *)(eth + 1);
	v4 = (void *)(eth + 1);
	if (p->v6) {
		if ((void *)(v6 + 1) > end)
			return false;
		eth->h_proto = bpf_htons(ETH_P_IPV6);
		wrapper_v6(v6, to, first, p->l3_len + room);
		return put_geneve(p, v6 + 1, end, bpf_htons(ETH_P_IPV6));
	}
	if ((void *)(v4 + 1) > end)
		return false;
	eth->h_proto = bpf_htons(ETH_P_IP);
	wrapper_v4(v4, to, first, p->l3_len + room);
	return put_geneve(p, v4 + 1, end, bpf_htons(ETH_P_IP));
}

/* Adds an option with the destination that a packet came with, after its
 * headers were rewritten. */
static __always_inline bool put_option(struct xdp_md *ctx,
				       const struct packet *p)
{
	const __u32 l2 = sizeof(struct ethhdr);
	const int room = added_len(p->v6, DISPATCH_OPT);
	struct option_v6 *option6;
	struct option_v4 *option4;
	struct ipv6hdr *v6;
	struct iphdr *v4;
	void *end, *at;

	if (bpf_xdp_adjust_head(ctx, -room))
		return false;
	end = (void *)(long)ctx->data_end;
	at = (void *)(long)ctx->data;
	if (p->v6) {
		v6 = at + l2;
		option6 = (void *)(v6 + 1);
		if ((void *)(option6 + 1) > end)
			return false;
		copy_words(at, at + sizeof(*option6), l2 + sizeof(*v6));
		lengthen_v6(v6, option6, p);
		return true;
	}
	v4 = at + l2;
	option4 = (void *)(v4 + 1);
	if ((void *)(option4 + 1) > end)
		return false;
	copy_words(at, at + sizeof(*option4), l2 + sizeof(*v4));
	lengthen_v4(v4, option4, p);
	return true;
}

/* Sends a packet of direct server return in the form that was configured. */
static __always_inline bool make_direct(struct xdp_md *ctx,
					const struct packet *p,
					struct flow_hit *hit, bool first)
{
	if (dispatch != DISPATCH_OPT) {
		spread_source(hit, p);
		return wrap_packet(ctx, p, &hit->to);
	}
	copy_addr(hit->to.src, p->key.src);
	return rewrite_headers(ctx, p, &hit->to) &&
	       (!(first || needs_option(p, hit)) || put_option(ctx, p));
}

/* Whether a packet is in several buffers, which not all drivers send for
 * others. */
static __always_inline bool is_scattered(struct xdp_md *ctx)
{
	return packet_len(ctx) > ctx->data_end - ctx->data;
}

/* Sends a packet to its next hop. */
static __always_inline int send_to(struct xdp_md *ctx,
				   const struct xdp_hop *hop)
{
	void *end = (void *)(long)ctx->data_end;
	void *at = (void *)(long)ctx->data;

	if (at + sizeof(hop->macs) > end)
		return XDP_DROP;
	copy_words(at, &hop->macs, sizeof(hop->macs));
	if (hop->out == hop->via)
		return XDP_TX; /* by any member of a bond */
	return bpf_redirect(hop->out, 0);
}

/*
 * Handles the first packet of a connection, as begin() of tc.bpf.c does.
 * CHOSEN: it has a flow of direct server return, and its route is the last that
 * was looked up. Nothing is counted of a packet that passes, as that program
 * does.
 */
GLOBAL int begin(struct xdp_md *ctx, struct packet *p, __u64 *flow)
{
	const struct uplink *up = uplink_of(ctx->ingress_ifindex);
	struct choice c = {};
	int verdict;

	if (!p || !flow || !up || !is_own(ctx, (const __u16 *)up->mac))
		return XDP_PASS;
	p->device = up->device;
	if (claim(p, &c) != CHOSEN || c.found == FRONTEND_NONE)
		return XDP_PASS;
	verdict = choose(p, &c);
	if (verdict == TC_ACT_SHOT) {
		count_choice(&c);
		count_failure(&p->key, c.reason);
		count_reason(ACCELERATED);
		return XDP_DROP;
	}
	if (verdict != CHOSEN || !(c.route & ROUTE_DIRECT) ||
	    !flows_admitted(p->key.proto) || plan(ctx, p, &c) != CHOSEN ||
	    c.action != ACTION_DIRECT || !can_send(p) ||
	    create(ctx, p, &c) != FLOW_MADE)
		return XDP_PASS;
	count_choice(&c);
	*flow = c.flow;
	return CHOSEN;
}

/* Handles a packet as its flow says: the flow that was just made, or the one
 * that its key leads to. */
GLOBAL int follow(struct xdp_md *ctx, struct packet *p, __u64 made)
{
	const struct xdp_hop *hop;
	struct flow_hit hit;
	bool direct;

	if (!p)
		return XDP_PASS;
	if (made ? !flow_read(&p->key, made, &hit) : !flow_find(&p->key, &hit))
		return NO_FLOW;
	direct = hit.action == ACTION_DIRECT;
	if ((hit.action != ACTION_SNAT && !direct) || p->ttl <= 1 ||
	    is_over(p, &hit) || (reset_removed && is_orphan(p, &hit)))
		return XDP_PASS;
	p->tick = last_tick();
	hop = hop_of(ctx, p, &hit, made);
	if (!hop || !is_own(ctx, hop->own) ||
	    (hop->out != hop->via && is_scattered(ctx)))
		return XDP_PASS;
	flow_account(ctx, &hit, p);
	/* It was modified if these fail, which they do for want of memory. */
	if (!(direct ? make_direct(ctx, p, &hit, made) :
		       rewrite_headers(ctx, p, &hit.to))) {
		count_reason(DROP_REWRITE);
		return XDP_DROP;
	}
	count_reason(direct    ? FORWARD_DIRECT :
		     hit.reply ? FORWARD_REPLY :
				 FORWARD_REMOTE);
	count_reason(ACCELERATED);
	return send_to(ctx, hop);
}

SEC("xdp.frags")
int tdm_xdp(struct xdp_md *ctx)
{
	struct packet p = {};
	__u64 made = 0;
	int verdict;

	if (!parse_plain(ctx, &p))
		return XDP_PASS;
	verdict = follow(ctx, &p, 0);
	if (verdict != NO_FLOW)
		return verdict;
	/* What conntrack and sockets know of others has to be asked. */
	if (!is_opening(&p) || draining || has_yielded() || is_awaited())
		return XDP_PASS;
	verdict = begin(ctx, &p, &made);
	if (verdict != CHOSEN)
		return verdict;
	verdict = follow(ctx, &p, made);
	return verdict == NO_FLOW ? XDP_PASS : verdict;
}
