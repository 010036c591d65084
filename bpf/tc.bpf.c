// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Packet load balancing, for clients whose sockets are not translated: clients
 * outside the node, and pods that opted out. The first packet of a connection
 * creates a flow; all others follow it.
 *
 * On uplinks, where clients come in: for a backend on this node, the
 * destination is translated and the packet goes up the stack; the reply gets
 * the frontend's address where it leaves the node. A packet to a remote backend
 * is masqueraded and redirected past the stack, and its reply is redirected to
 * the client.
 *
 * On the devices of opted-out pods: the destination is translated where the
 * packet leaves the pod, and translated back where the reply enters it.
 */
#include <linux/bpf.h>
#include <linux/if_packet.h>
#include <linux/pkt_cls.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

/* The steps of a packet, in their order. */
#include "parse.h"
#include "fragment.h"
#include "flow_follow.h"
#include "icmp_follow.h"
#include "choice.h"
#include "plan.h"
#include "flow_create.h"
#include "remap.h"
#include "icmp_echo.h"
#include "icmp_error.h"
#include "icmp_outer.h"
#include "reject.h"
#include "unwrap.h"

#include "addr.h"
#include "conntrack.h"
#include "failure.h"
#include "flow_life.h"
#include "flow_record.h"
#include "flow_stale.h"
#include "flow_maps.h"
#include "host_sock.h"
#include "icmp.h"
#include "node.h"
#include "packet.h"
#include "packet_successor.h"
#include "reasons.h"
#include "redirect.h"
#include "tc_config.h"
#include "verdict.h"
#include "wrapper.h"

char __license[] SEC("license") = "Dual BSD/GPL";

/* Whether a packet without a flow may be of one that another node translates
 * for direct server return. */
static __always_inline bool may_be_translated(const struct packet *p)
{
	return role == ROLE_UPLINK && p->key.proto == IPPROTO_TCP &&
	       p->wrapped == BARE && !is_opening(p) && had_options();
}

/* Handles a packet without a flow: picks a backend, creates a flow, follows it.
 */
static __always_inline int begin(struct __sk_buff *skb, struct packet *p)
{
	struct choice c = {};
	int verdict;

	if (packets_yield(skb))
		return p->wrapped == WRAPPED ? NEXT : NO_FLOW;
	verdict = claim(p, &c);
	if (verdict == CHOSEN && is_for_earlier(p))
		return NEXT;
	/* It may be of a connection that began elsewhere than at the frontend
	 * whose port it has. */
	if (verdict == CHOSEN && !is_opening(p)) {
		if (netfilter_has(skb, p))
			return done(PASS_NETFILTER, NEXT);
		if (host_is_connected(skb, p))
			return NO_FLOW;
	}
	if (verdict == CHOSEN) {
		verdict = choose(p, &c);
		if (verdict != NEXT && verdict != NO_FLOW)
			count_choice(&c);
	}
	if (verdict == CHOSEN && !flows_admitted(p->key.proto))
		return fail(p, DROP_NO_FLOW, TC_ACT_SHOT);
	if (verdict == CHOSEN)
		verdict = plan(skb, p, &c);
	if (verdict != CHOSEN)
		return c.reason ? fail(p, c.reason, verdict) : verdict;
	if (c.reason)
		count_reason(c.reason);
	switch (create(skb, p, &c)) {
	case FLOW_MADE:
	case FLOW_OUTRUN:
		break;
	case FLOW_PORT_USED:
		count_failure(&p->key, REJECT_NO_PORT);
		return reject(skb, p);
	default:
		return fail(p, DROP_NO_FLOW, TC_ACT_SHOT);
	}
	verdict = follow(skb, p, &c, true);
	return verdict == NO_FLOW ? fail(p, DROP_RACED, TC_ACT_SHOT) : verdict;
}

/* Answers another node that asks whether this one takes packets for a backend
 * by direct server return. A backend may answer one with an option too, so the
 * answer to that has another number. */
static __always_inline int answer_probe(struct __sk_buff *skb, struct packet *p)
{
	const struct wrapper *w = last_wrapper();

	if (!w || draining || !is_echo_request(p) ||
	    !same_addr(p->key.dst, w->dst) || !same_addr(p->key.src, w->src))
		return fail(p, DROP_NO_TARGET, TC_ACT_SHOT);
	count_reason(ANSWER_ECHO);
	if (w->form == DISPATCH_OPT && mark_echo(skb, p))
		return fail(p, DROP_REWRITE, TC_ACT_SHOT);
	return answer_echo(skb, p);
}

static __always_inline int handle_icmp(struct __sk_buff *skb, struct packet *p,
				       bool ingress)
{
	if (is_icmp_error(p)) {
		int verdict = follow_error(skb, p, ingress);

		if (verdict == NEXT && ingress && role == ROLE_UPLINK &&
		    p->wrapped == BARE)
			verdict = follow_outer_error(skb, p);
		return verdict == PAST_STACK ? forward_error(skb, p) : verdict;
	}
	if (p->wrapped == WRAPPED)
		return answer_probe(skb, p);
	if (!ingress || draining || !is_echo_request(p) ||
	    local_flags(p->key.dst) || is_martian(p->key.src) ||
	    packets_yield(skb))
		return NEXT;
	if (bpf_map_lookup_elem(&tdm_vip, p->key.dst)) {
		count_reason(ANSWER_ECHO);
		return answer_echo(skb, p);
	}
	if (!is_unserved(p->key.dst))
		return NEXT;
	count_failure(&p->key, REJECT);
	return reject(skb, p);
}

/* Copies the fields of the packet that was taken out of another one. */
static __always_inline enum parsed parse_again(struct __sk_buff *skb,
					       struct packet *p)
{
	const struct wrapper *w = last_wrapper();
	__u16 taken;

	if (!w)
		return BROKEN;
	*p = w->inner;
	taken = p->l3 - l2_len;
	p->l3 -= taken;
	p->l4 -= taken;
	p->wrapped = WRAPPED;
	return UNDERSTOOD;
}

static __always_inline int handle(struct __sk_buff *skb, bool ingress)
{
	struct packet p = { .l3 = l2_len };
	enum parsed parsed;
	int verdict;

	/* For a VLAN device on top of this one. */
	if (skb->vlan_present)
		return NEXT;
	parsed = parse(skb, skb->protocol, &p);
	if (role == ROLE_UPLINK && ingress) {
		if (may_be_wrapped(&p, parsed) && unwrap(skb))
			parsed = parse_again(skb, &p);
		else if (may_have_option(&p, parsed) &&
			 take_option(skb, &p) < 0)
			return fail(&p, DROP_REWRITE, TC_ACT_SHOT);
	}
	if (parsed == FOREIGN)
		return NEXT;
	if (parsed == BROKEN)
		return done(PASS_HEADERS, NEXT);
	/* Fragments of ICMP pass to the stack, which reassembles them. */
	if (is_icmp(&p))
		return p.fragment == WHOLE ? handle_icmp(skb, &p, ingress) :
					     done(PASS_FRAGMENT, NEXT);
	if (p.fragment != WHOLE && !follow_fragment(&p))
		return done(PASS_FRAGMENT, NEXT);
	verdict = follow(skb, &p, NULL, ingress);
	if (verdict == NO_FLOW && ingress && may_be_translated(&p))
		verdict = follow_translated(skb, &p);
	if (verdict == NO_FLOW && ingress && !draining &&
	    p.fragment != LATER_FRAGMENT)
		verdict = begin(skb, &p);
	if (verdict == NO_FLOW && remap(skb, &p, ingress))
		verdict = follow(skb, &p, NULL, ingress);
	switch (verdict) {
	case NO_FLOW:
		/* The other datapath has frontends while this one drains. */
		return draining ? NEXT : of_no_flow(&p);
	case REFUSED:
		count_failure(&p.key, REJECT);
		return reject(skb, &p);
	case NOT_ADMITTED:
		count_failure(&p.key, DROP_SOURCE_RANGE);
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
	/* The frame of a pod behind a bridge is addressed to the bridge, not to
	 * the device of the pod. */
	if (skb->pkt_type != PACKET_HOST &&
	    (role != ROLE_POD || skb->pkt_type != PACKET_OTHERHOST))
		return NEXT;
	return handle(skb, true);
}

SEC("tc")
int tdm_out(struct __sk_buff *skb)
{
	if (was_redirected(skb))
		return NEXT;
	return handle(skb, false);
}
