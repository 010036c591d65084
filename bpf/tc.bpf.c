// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Packets that no socket of this node translated: those of clients outside, and
 * those of pods that opted out. A connection gets a flow with its first packet;
 * all others follow it.
 *
 * On uplinks, where clients come in: to a backend on this node the destination
 * is translated, the packet goes up the stack, and the reply gets the
 * frontend's address back where it leaves. A remote backend gets the packet
 * from this node's own address, past the stack, and so does the client the
 * reply.
 *
 * On the devices of opted-out pods: the destination is translated where the
 * packet comes out of the pod, and back where the reply goes into it.
 */
#include <linux/bpf.h>
#include <linux/if_packet.h>
#include <linux/pkt_cls.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "conntrack.h"
#include "flow.h"
#include "forward.h"
#include "fragment.h"
#include "frontend.h"
#include "icmp.h"
#include "lb_maps.h"
#include "nat.h"
#include "node.h"
#include "packet.h"
#include "reasons.h"
#include "reject.h"
#include "select.h"
#include "snat.h"
#include "tc_config.h"

char __license[] SEC("license") = "Dual BSD/GPL";

/*
 * TCX_NEXT, and TC_ACT_UNSPEC for clsact: whoever is behind us, the CNI's own
 * programs for one, sees the packet. TC_ACT_OK would hide it from them.
 */
#define NEXT -1

/* What functions return besides verdicts. */
enum outcome {
	NO_FLOW = 1000,
	CHOSEN,	 /* there is a backend */
	REFUSED, /* nobody will ever answer */
	EXPIRED, /* its last hop was this one */
	ON,	 /* past the stack */
	TOO_BIG, /* for the way it would go, whose limit is p->mtu */
};

static __always_inline int done(enum reason reason, int verdict)
{
	count_reason(reason);
	return verdict;
}

/* Length of the longest packet that this one will be on the wire. */
static __always_inline __u16 wire_len(const struct __sk_buff *skb,
				      const struct packet *p)
{
	if (skb->gso_size)
		return p->l4 - p->l3 + p->l4_len + skb->gso_size;
	return p->l3_len;
}

/* Sends a packet of a flow on, past the stack. */
static __always_inline int forward(struct __sk_buff *skb, struct packet *p,
				   const struct flow_hit *hit)
{
	struct bpf_fib_lookup fib;
	long found;

	if (p->ttl <= 1)
		return EXPIRED;
	found = route(skb, &fib, &hit->to, wire_len(skb, p), 0);
	if (found == BPF_FIB_LKUP_RET_FRAG_NEEDED) {
		p->mtu = fib.mtu_result;
		return TOO_BIG;
	}
	/* The route may be back soon; the stack would reset the connection. */
	if (found != BPF_FIB_LKUP_RET_SUCCESS &&
	    found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return done(DROP_NO_ROUTE, TC_ACT_SHOT);
	if (rewrite(skb, p, &hit->to) || decrement_ttl(skb, p))
		return done(DROP_REWRITE, TC_ACT_SHOT);
	count_reason(hit->reply ? FORWARD_REPLY : FORWARD_REMOTE);
	return send_out(&fib);
}

/* The flow's client begins anew, or its backend serves no longer. */
static __always_inline bool is_over(const struct packet *p,
				    const struct flow_hit *hit)
{
	const struct flow *f = hit->flow;

	if (hit->reply)
		return false;
	if (p->key.proto == IPPROTO_TCP) {
		if ((p->tcp_flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
			return false;
		/* Who serves now gets all that is new. */
		if (draining || hit->flags & FLOW_CLOSED)
			return true;
		if (hit->flags & FLOW_ESTABLISHED)
			return false;
	}
	return !backend_of(f->backend, f->backend_generation, f->service);
}

/* A request to a backend that the API does not know any more. */
static __always_inline bool is_orphan(const struct packet *p,
				      const struct flow_hit *hit)
{
	const struct flow *f = hit->flow;

	return !hit->reply && p->key.proto == IPPROTO_TCP &&
	       p->fragment == WHOLE &&
	       (__s32)(f->backend_generation - first_generation) >= 0 &&
	       !backend_of(f->backend, f->backend_generation, f->service);
}

/* Does with a packet what its flow says, which may be known. */
GLOBAL int follow(struct __sk_buff *skb, struct packet *p, __u64 known,
		  bool ingress)
{
	struct flow_hit hit;

	if (!p)
		return NEXT;
	if (known ? !flow_read(&p->key, known, &hit) :
		    !flow_find(&p->key, &hit))
		return NO_FLOW;
	/* Of requests and replies, each is translated in one place alone. */
	if (ingress != (!hit.reply || hit.flags & FLOW_INGRESS))
		return NEXT;
	/* Who serves now does not know which of this node's ports are taken. */
	if (draining && hit.reply && hit.flags & FLOW_REMOTE &&
	    netfilter_has(skb, p))
		return done(PASS_NETFILTER, NEXT);
	if (is_over(p, &hit)) {
		flow_end(hit.id, hit.life);
		return NO_FLOW;
	}
	if (reset_removed && is_orphan(p, &hit)) {
		flow_end(hit.id, hit.life);
		return REFUSED;
	}
	flow_account(&hit, p, skb->len - p->l3);
	if (hit.flags & FLOW_REMOTE)
		return forward(skb, p, &hit);
	if (rewrite(skb, p, &hit.to))
		return done(DROP_REWRITE, TC_ACT_SHOT);
	return done(hit.reply ? FORWARD_REPLY : FORWARD_LOCAL, NEXT);
}

/* Sends an error that has been translated on, past the stack. */
GLOBAL int forward_error(struct __sk_buff *skb, struct packet *p)
{
	struct bpf_fib_lookup fib;
	long found;

	if (!p)
		return TC_ACT_SHOT;
	if (p->ttl <= 1)
		return done(ERROR_TTL, TC_ACT_SHOT);
	found = route(skb, &fib, &p->key, 1, 0);
	if (found != BPF_FIB_LKUP_RET_SUCCESS &&
	    found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return done(DROP_NO_ROUTE, TC_ACT_SHOT);
	if (decrement_ttl(skb, p))
		return done(DROP_REWRITE, TC_ACT_SHOT);
	count_reason(FORWARD_ICMP);
	return send_out(&fib);
}

/* Follows the flow that an ICMP error is about. */
GLOBAL int follow_error(struct __sk_buff *skb, struct packet *p, bool ingress)
{
	struct packet inner = {};
	struct flow_key key;
	struct flow_hit hit;

	if (!p || !parse_quote(skb, p, &inner))
		return NEXT;
	turn_around(&key, &inner.key);
	if (!flow_find(&key, &hit) ||
	    ingress != (!hit.reply || hit.flags & FLOW_INGRESS))
		return NEXT;
	if (rewrite_error(skb, p, &inner, &hit))
		return done(DROP_REWRITE, TC_ACT_SHOT);
	return hit.flags & FLOW_REMOTE ? ON : done(FORWARD_ICMP, NEXT);
}

/* The frontend that a packet is for: that of its address, or a NodePort. */
static __always_inline enum frontend_result
frontend_of(const struct flow_key *packet, struct frontend_ref *fe)
{
	struct frontend_key key = {
		.port = packet->dport,
		.proto = packet->proto,
		.scope = SCOPE_ADDRESS,
	};
	enum frontend_result found;

	copy_addr(key.addr, packet->dst);
	found = frontend_lookup(&key, fe);
	if (found != FRONTEND_NONE ||
	    !(local_flags(key.addr) & LOCAL_NODEPORTS))
		return found;
	frontend_key_node(&key);
	return frontend_lookup(&key, fe);
}

static __always_inline enum lb_origin origin_of(const __be32 *client)
{
	const struct node *node = this_node();

	if (from_pod || (node && is_pod(node, client)))
		return FROM_POD;
	return local_flags(client) ? FROM_HOST : FROM_OUTSIDE;
}

/* Where a backend is, and with which address this node reaches it. */
static __always_inline bool is_remote(struct __sk_buff *skb,
				      const struct packet *p,
				      const struct backend *be,
				      struct flow_key *reply)
{
	struct bpf_fib_lookup fib;
	struct flow_key to = { .dport = be->port, .proto = p->key.proto };
	__u32 ifindex;
	long found;

	if (be->flags & BACKEND_LOCAL || local_flags(be->addr))
		return false;
	copy_addr(to.dst, be->addr);
	/* A length that fits anywhere: without one, this packet's would count.
	 */
	found = route(skb, &fib, &to, 1, have_fib_source ? FIB_SOURCE : 0);
	if (found != BPF_FIB_LKUP_RET_SUCCESS &&
	    found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return false;
	/* Behind a device of ours that is no uplink, it is on this node. */
	ifindex = fib.ifindex;
	if (!bpf_map_lookup_elem(&tdm_uplink, &ifindex))
		return false;
	if (have_fib_source && !p->v6)
		set_v4(reply->dst, fib.ipv4_src);
	else if (have_fib_source)
		copy_addr(reply->dst, fib.ipv6_src);
	else
		node_addr(p->v6, reply->dst);
	return true;
}

/*
 * Whether a connection is to come from this node's own address. From an uplink,
 * all to remote backends, or their replies would not pass here. From a pod,
 * that to itself, and what is to be masqueraded if the replies come by an
 * uplink: those of another pod of this node would be taken for the host's.
 */
static __always_inline bool has_own_source(struct __sk_buff *skb,
					   const struct packet *p,
					   const struct backend *be,
					   __u32 route, struct flow_key *reply)
{
	if (role == ROLE_UPLINK)
		return is_remote(skb, p, be, reply);
	if (same_addr(be->addr, p->key.src)) {
		node_addr(p->v6, reply->dst);
		return true;
	}
	return route & ROUTE_MASQUERADE && is_remote(skb, p, be, reply);
}

/* What was chosen for a new connection. */
struct choice {
	__u32 backend;
	__u32 generation; /* of the backend */
	__u32 route;
	__u64 flow; /* that was made for it, as the flow's keys have it */
};

/* Places in the ring of the young that are looked at for one. */
#define ROOM_ATTEMPTS 4

static __always_inline const struct backend *chosen_of(__u32 id)
{
	return bpf_map_lookup_elem(&tdm_backend, &id);
}

/* Makes the flow of a new connection. */
GLOBAL int create(struct __sk_buff *skb, const struct packet *p,
		  struct choice *c)
{
	__u32 id = flow_take();
	__u32 generation, now = now_s();
	const struct backend *be;
	struct flow *f;
	__u64 word;
	int err;

	if (!p || !c)
		return FLOW_NO_ROOM;
	be = chosen_of(c->backend);

	for (int i = 0; i < ROOM_ATTEMPTS && !id; i++) {
		flow_make_room(0, false);
		id = flow_take();
	}
	f = flow_of(id);
	if (!id || !f || !be)
		return FLOW_NO_ROOM;
	generation = (f->life >> 32) + 1;
	if (!generation)
		generation = 1;
	*(volatile __u64 *)&f->life = life_of(generation, FLOW_CLAIMED);
	word = flow_word(id, generation);

	f->request = p->key;
	copy_addr(f->reply.src, be->addr);
	copy_addr(f->reply.dst, p->key.src);
	f->reply.sport = be->port;
	f->reply.dport = p->key.sport;
	f->reply.proto = p->key.proto;
	f->flags = 0;
	if (has_own_source(skb, p, be, c->route, &f->reply))
		f->flags = FLOW_REMOTE | FLOW_INGRESS;
	f->service = be->service;
	f->backend = c->backend;
	f->backend_generation = c->generation;
	f->seen = now;
	f->packets[0] = f->packets[1] = 0;
	f->bytes[0] = f->bytes[1] = 0;
	barrier();
	*(volatile __u64 *)&f->life = life_of(generation, FLOW_NEW);

	err = -EEXIST;
	if (!(f->flags & FLOW_INGRESS))
		err = key_insert(&f->reply, word);
	/* Also where the client uses its port for several frontends, and two of
	 * them led to one backend. */
	if (err == -EEXIST)
		err = snat(skb, f, id, generation);
	if (!err) {
		err = key_insert(&f->request, word);
		if (err)
			bpf_map_delete_elem(&tdm_flow_key, &f->reply);
	}
	if (err) {
		*(volatile __u64 *)&f->life = life_of(generation, FLOW_FREE);
		flow_give(id, f);
		if (err == -EADDRINUSE)
			return FLOW_PORT_USED;
		return err == -EEXIST ? FLOW_OUTRUN : FLOW_NO_ROOM;
	}
	f->flags |= FLOW_INDEXED;
	*(volatile __u64 *)&f->life = life_of(generation, FLOW_YOUNG);
	flow_make_room(word, false);
	c->flow = word;
	return FLOW_MADE;
}

static __always_inline void
count_service(__u32 service, enum select_result result, __u32 backend)
{
	struct service_stats *s = bpf_map_lookup_elem(&tdm_svc_stats, &service);
	__u64 *b;

	if (!s)
		return;
	if (result == SELECT_REJECT)
		__sync_fetch_and_add(&s->rejected, 1);
	else if (result == SELECT_DROP)
		__sync_fetch_and_add(&s->dropped, 1);
	else if (result == SELECT_RACED)
		__sync_fetch_and_add(&s->raced, 1);
	if (result != SELECT_OK)
		return;
	__sync_fetch_and_add(&s->connections, 1);
	b = bpf_map_lookup_elem(&tdm_be_stats, &backend);
	if (b)
		__sync_fetch_and_add(b, 1);
}

/* As FORWARD_ATTEMPTS in sock.bpf.c. */
#define SELECT_ATTEMPTS 3

/* Whether a packet is of a connection that began before these programs were
 * here. It takes a lookup, so it is asked where the answer matters. */
static __always_inline bool is_netfilters(struct __sk_buff *skb,
					  const struct packet *p)
{
	return (p->key.proto != IPPROTO_TCP ||
		(p->tcp_flags & (TCP_SYN | TCP_ACK)) != TCP_SYN) &&
	       netfilter_has(skb, p);
}

/* Finds a backend for a packet without a flow. */
GLOBAL int choose(struct __sk_buff *skb, const struct packet *p,
		  struct choice *c)
{
	enum select_result result = SELECT_RACED;
	struct affinity chosen;
	struct frontend_ref fe;
	struct backend *be = NULL;
	__u32 service = 0, pick;
	__be32 src[4], dst[4];

	if (!p || !c)
		return NEXT;
	/* Linux 6.1 takes keys of maps from the stack, and not from callers of
	 * functions that are verified once. */
	copy_addr(src, p->key.src);
	copy_addr(dst, p->key.dst);
	for (int i = 0; i < SELECT_ATTEMPTS; i++) {
		enum frontend_result found = frontend_of(&p->key, &fe);

		if (found == FRONTEND_NONE) {
			if (!is_unserved(p->key.dst) || local_flags(dst))
				return NEXT;
			if (is_martian(p->key.src))
				return done(PASS_MARTIAN, NEXT);
			if (is_netfilters(skb, p))
				return done(PASS_NETFILTER, NEXT);
			result = SELECT_REJECT;
			break;
		}
		if (is_martian(p->key.src))
			return done(PASS_MARTIAN, NEXT);
		if (is_netfilters(skb, p))
			return done(PASS_NETFILTER, NEXT);
		/* Of a connection that is gone already. */
		if (p->key.proto == IPPROTO_TCP && p->tcp_flags & TCP_RST)
			return done(PASS_RST, NEXT);
		if (found == FRONTEND_RACED)
			continue;
		service = fe.service;
		if (!frontend_admits(&fe, p->key.dst, p->key.src)) {
			count_service(service, SELECT_DROP, 0);
			return done(DROP_SOURCE_RANGE, TC_ACT_SHOT);
		}
		c->route = frontend_route(&fe, p->key.dst, origin_of(src));
		/* By the connection, so that one that was forgotten gets the
		 * same. */
		pick = check_of((const __u32 *)&p->key,
				sizeof(p->key) / sizeof(__u32));
		be = select_backend(&fe, src, pick, &chosen, &result);
		if (result != SELECT_RACED)
			break;
	}
	count_service(service, result, be ? chosen.backend : 0);
	if (!be) {
		if (result == SELECT_REJECT)
			return REFUSED;
		return done(result == SELECT_DROP ? DROP_POLICY : DROP_RACED,
			    TC_ACT_SHOT);
	}
	c->backend = chosen.backend;
	c->generation = chosen.generation;
	return CHOSEN;
}

/* Tells the sender that its packet lived too long, or is too long. */
static __always_inline int send_error(struct __sk_buff *skb, struct packet *p,
				      enum reason reason)
{
	count_reason(reason);
	if (is_icmp(p) || p->fragment == LATER_FRAGMENT)
		return TC_ACT_SHOT;
	if (reason == ERROR_TTL)
		return icmp_error(
			skb, p, p->v6 ? ICMPV6_TIME_EXCEED : ICMP_TIME_EXCEEDED,
			0, 0);
	if (p->v6)
		return icmp_error(skb, p, ICMPV6_PKT_TOOBIG, 0, p->mtu);
	/* Also where fragments are allowed: nobody here could make them, and
	 * the sender can. */
	return icmp_error(skb, p, ICMP_DEST_UNREACH, ICMP_FRAG_NEEDED, p->mtu);
}

/* A packet without a flow. */
static __always_inline int begin(struct __sk_buff *skb, struct packet *p)
{
	struct choice c = {};
	int verdict;

	verdict = choose(skb, p, &c);
	if (verdict != CHOSEN)
		return verdict;
	switch (create(skb, p, &c)) {
	case FLOW_MADE:
	case FLOW_OUTRUN:
		break;
	case FLOW_PORT_USED:
		count_reason(REJECT_NO_PORT);
		return reject(skb, p);
	default:
		return done(DROP_NO_FLOW, TC_ACT_SHOT);
	}
	verdict = follow(skb, p, c.flow, true);
	return verdict == NO_FLOW ? done(DROP_RACED, TC_ACT_SHOT) : verdict;
}

static __always_inline int handle_icmp(struct __sk_buff *skb, struct packet *p,
				       bool ingress)
{
	if (is_icmp_error(p)) {
		int verdict = follow_error(skb, p, ingress);

		return verdict == ON ? forward_error(skb, p) : verdict;
	}
	if (!ingress || !is_echo_request(p) || local_flags(p->key.dst) ||
	    is_martian(p->key.src))
		return NEXT;
	if (bpf_map_lookup_elem(&tdm_vip, p->key.dst)) {
		count_reason(ANSWER_ECHO);
		return answer_echo(skb, p);
	}
	if (!is_unserved(p->key.dst))
		return NEXT;
	count_reason(REJECT);
	return reject(skb, p);
}

static __always_inline int handle(struct __sk_buff *skb, bool ingress)
{
	struct packet p = { .l3 = l2_len };
	int verdict;

	/* For a VLAN on top of this device. */
	if (skb->vlan_present)
		return NEXT;
	switch (parse(skb, skb->protocol, &p)) {
	case UNDERSTOOD:
		break;
	case FOREIGN:
		return NEXT;
	case BROKEN:
		return done(PASS_HEADERS, NEXT);
	}
	/* Fragments of ICMP are left to who puts them together. */
	if (is_icmp(&p))
		return p.fragment == WHOLE ? handle_icmp(skb, &p, ingress) :
					     done(PASS_FRAGMENT, NEXT);
	if (p.fragment != WHOLE && !follow_fragment(&p))
		return done(PASS_FRAGMENT, NEXT);
	verdict = follow(skb, &p, 0, ingress);
	if (verdict == NO_FLOW && ingress && p.fragment != LATER_FRAGMENT)
		verdict = begin(skb, &p);
	switch (verdict) {
	case NO_FLOW:
		return NEXT;
	case REFUSED:
		count_reason(REJECT);
		return reject(skb, &p);
	case EXPIRED:
		return send_error(skb, &p, ERROR_TTL);
	case TOO_BIG:
		return send_error(skb, &p, ERROR_TOO_BIG);
	}
	return verdict;
}

SEC("tc")
int tdm_in(struct __sk_buff *skb)
{
	/* A pod behind a bridge sends to the bridge, not to the device that is
	 * its port. */
	if (skb->pkt_type != PACKET_HOST &&
	    (role != ROLE_POD || skb->pkt_type != PACKET_OTHERHOST))
		return NEXT;
	return handle(skb, true);
}

SEC("tc")
int tdm_out(struct __sk_buff *skb)
{
	return handle(skb, false);
}
