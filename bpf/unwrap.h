/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_UNWRAP_H
#define TANDEM_UNWRAP_H

#include <linux/bpf.h>
#include <linux/errno.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "choice.h"
#include "flow_index.h"
#include "flow_record.h"
#include "fragment.h"
#include "frontend.h"
#include "geneve.h"
#include "global.h"
#include "icmp.h"
#include "length.h"
#include "nat.h"
#include "node.h"
#include "option_edit.h"
#include "packet.h"
#include "parse.h"
#include "reasons.h"
#include "spread.h"
#include "target.h"
#include "tc_config.h"
#include "wrapper.h"

#define ECN_MASK 3
#define ECN_CE 3

/* Whether a packet may be one in a packet: of a protocol that is not parsed, or
 * a datagram to Geneve's port. */
static __always_inline bool may_be_wrapped(const struct packet *p,
					   enum parsed parsed)
{
	return parsed == FOREIGN ||
	       (parsed == UNDERSTOOD && p->fragment == WHOLE &&
		p->key.proto == IPPROTO_UDP &&
		p->key.dport == bpf_htons(GENEVE_PORT));
}

/* Whether the payload of an outer IP header, from an offset on, is a packet. */
static __always_inline bool has_packet(struct __sk_buff *skb, struct wrapper *w,
				       __u8 protocol, __u8 ip_in_ip,
				       __u32 offset)
{
	w->form = protocol == IPPROTO_UDP ? DISPATCH_GENEVE : DISPATCH_IPIP;
	return w->form == DISPATCH_GENEVE ?
		       is_geneve(skb, offset, skb->protocol) :
		       protocol == ip_in_ip;
}

/* Reads the outer headers, which begin at an offset; returns their length, 0 if
 * they are not those of a packet in a packet. Nodes send neither options nor
 * fragments. */
static __always_inline __u32 parse_wrapper(struct __sk_buff *skb, __u32 l3,
					   struct wrapper *w)
{
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = &w->header.v4;

		if (!load(skb, l3, ip, sizeof(*ip)) || ip->version != 4 ||
		    ip->ihl != sizeof(*ip) / 4 ||
		    ip->frag_off & bpf_htons(IP_MF | IP_OFFSET) ||
		    !has_packet(skb, w, ip->protocol, IPPROTO_IPIP,
				l3 + sizeof(*ip)))
			return 0;
		set_v4(w->src, ip->saddr);
		set_v4(w->dst, ip->daddr);
		w->ecn_ce = (ip->tos & ECN_MASK) == ECN_CE;
		return added_len(false, w->form);
	}
	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = &w->header.v6;

		if (!load(skb, l3, ip, sizeof(*ip)) || ip->version != 6 ||
		    !has_packet(skb, w, ip->nexthdr, IPPROTO_IPV6,
				l3 + sizeof(*ip)))
			return 0;
		__builtin_memcpy(w->src, &ip->saddr, sizeof(w->src));
		__builtin_memcpy(w->dst, &ip->daddr, sizeof(w->dst));
		w->ecn_ce = (ip->flow_lbl[0] >> 4 & ECN_MASK) == ECN_CE;
		return added_len(true, w->form);
	}
	return 0;
}

/* Whether a packet may have an option of direct server return. */
static __always_inline bool may_have_option(const struct packet *p,
					    enum parsed parsed)
{
	return parsed == UNDERSTOOD &&
	       p->l4 - p->l3 >=
		       (p->v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) +
			       added_len(p->v6, DISPATCH_OPT);
}

/*
 * Whether the packet in a packet is for this project: of a connection that it
 * translates, to a frontend while this node takes such packets, or an ICMP
 * message to a backend to which other nodes send them. Whether the latter is
 * about a connection is asked later.
 */
static __always_inline bool is_for_target(const struct wrapper *w,
					  struct packet *inner)
{
	const __be32 any[4] = {};
	struct frontend_ref fe;
	struct flow_entry *e;
	__u64 word;

	if (is_icmp(inner))
		return inner->fragment == WHOLE && is_target(w->dst);
	if (inner->fragment != WHOLE && !follow_fragment(inner))
		return false;
	e = entry_of(&inner->key, home_of(&inner->key), &word);
	if (e && e->action == ACTION_LOCAL && !(word & ENTRY_REPLY))
		return true;
	return is_target(any) &&
	       packet_frontend(&inner->key, w->src, &fe) != FRONTEND_NONE;
}

/* Sets the mark of congestion of the outer header in the packet, which corrects
 * the checksum of IPv4. */
static __always_inline void receive_mark(struct __sk_buff *skb,
					 struct packet *inner)
{
	bpf_skb_ecn_set_ce(skb);
	if (!inner->v6)
		bpf_skb_load_bytes(skb, l2_len + offsetof(struct iphdr, check),
				   &inner->l3_check, sizeof(inner->l3_check));
}

/* Notes the sender of a packet that does not say which node it is: a probe is
 * of its source, and any other packet may be for a NodePort of the node whose
 * address it has. For no node, it is an address of the other family, which no
 * address of the packet equals. */
static __always_inline void guess_sender(struct wrapper *w,
					 const struct packet *inner)
{
	__be32 addr[4];

	copy_addr(addr, is_icmp(inner) ? inner->key.src : inner->key.dst);
	if (is_node_address(addr)) {
		copy_addr(w->src, addr);
		return;
	}
	__builtin_memset(w->src, 0, sizeof(w->src));
	if (inner->v6)
		set_v4(w->src, 0);
}

/* Takes a packet that another node sent for direct server return out of its
 * outer packet, whose addresses are in last_wrapper() then. Other packets in
 * packets, such as those of a CNI's tunnels, stay as they are. */
GLOBAL int unwrap(struct __sk_buff *skb)
{
	struct wrapper *w = last_wrapper();
	struct packet *inner;
	bool spread;
	__u32 len;

	if (!w)
		return false;
	inner = &w->inner;
	len = parse_wrapper(skb, l2_len, w);
	if (!len)
		return false;
	__builtin_memset(inner, 0, sizeof(*inner));
	inner->l3 = l2_len + len;
	if (parse(skb, skb->protocol, inner) != UNDERSTOOD)
		return false;
	spread = is_spread(w->src);
	if (spread)
		guess_sender(w, inner);
	if (!is_for_target(w, inner) || (!spread && !is_node_address(w->src)))
		return false;
	if (bpf_skb_adjust_room(skb, -(__s32)len, BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO))
		return false;
	if (w->ecn_ce)
		receive_mark(skb, inner);
	count_reason(UNWRAP);
	return true;
}

/*
 * Removes the option of a packet that another node sent for direct server
 * return, which gets back the destination that its client sent it to: what the
 * option says, so a sender gains no more by it than by a packet to there. The
 * backend is in last_wrapper() then. Other packets stay as they are. Returns
 * whether it did so; below 0 if it failed halfway.
 */
GLOBAL int take_option(struct __sk_buff *skb, struct packet *p)
{
	struct wrapper *w = last_wrapper();
	struct packet *inner;

	if (!p || !w)
		return false;
	inner = &w->inner;
	if (!read_option(skb, p, w))
		return false;
	w->form = DISPATCH_OPT;
	w->ecn_ce = false;
	copy_addr(w->dst, p->key.dst);
	w->port = p->key.dport;
	guess_sender(w, inner);
	if (!is_for_target(w, inner))
		return false;
	note_option();
	count_reason(UNWRAP);
	if (remove_option(skb, p) || rewrite_fields(skb, p, &inner->key) ||
	    (!p->v6 && !load(skb, p->l3 + offsetof(struct iphdr, check),
			     &p->l3_check, sizeof(p->l3_check))))
		return -EFAULT;
	p->key = inner->key;
	p->wrapped = WRAPPED;
	return true;
}

#endif
