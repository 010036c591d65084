/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_CONNTRACK_H
#define TANDEM_CONNTRACK_H

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "global.h"
#include "host_sock.h"
#include "packet.h"
#include "tc_config.h"

/*
 * The kernel's conntrack (Linux 5.18). It knows connections that netfilter or
 * IPVS translates, for another proxy or for this one in another mode. They stay
 * translated after the rules are removed.
 */

union nf_inet_addr {
	__be32 ip6[4];
} __attribute__((preserve_access_index));

union nf_conntrack_man_proto {
	__be16 all;
} __attribute__((preserve_access_index));

struct nf_conntrack_man {
	union nf_inet_addr u3;
	union nf_conntrack_man_proto u;
} __attribute__((preserve_access_index));

struct nf_conntrack_tuple {
	struct nf_conntrack_man src;
	struct {
		union nf_inet_addr u3;
		union {
			__be16 all;
		} u;
	} dst;
} __attribute__((preserve_access_index));

struct nf_conntrack_tuple_hash {
	struct nf_conntrack_tuple tuple;
} __attribute__((preserve_access_index));

struct nf_conn {
	struct nf_conntrack_tuple_hash tuplehash[2]; /* original, reply */
	unsigned long status;
} __attribute__((preserve_access_index));

struct bpf_ct_opts {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};

/* Must match the kernel, whose structure begins like this one. */
_Static_assert(sizeof(struct bpf_ct_opts) == 12, "bpf_ct_opts");

#define CT_OWN_NETNS -1
#define CT_REPLY 1 /* enum ip_conntrack_dir */
#define IPS_CONFIRMED (1 << 3)
#define IPS_DST_NAT (1 << 5)

extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *skb,
					 struct bpf_sock_tuple *tuple,
					 __u32 tuple__sz,
					 struct bpf_ct_opts *opts,
					 __u32 opts__sz) __ksym __weak;
extern void bpf_ct_release(struct nf_conn *ct) __ksym __weak;

/* Looks up a connection by its addresses and ports on the wire, and in opts its
 * direction. The caller has to release it. */
static __always_inline struct nf_conn *
conntrack_find(struct __sk_buff *skb, const struct flow_key *key,
	       struct bpf_ct_opts *opts)
{
	struct bpf_sock_tuple tuple = {};

	if (!have_conntrack)
		return NULL;
	opts->netns_id = CT_OWN_NETNS;
	opts->l4proto = key->proto;
	return bpf_skb_ct_lookup(skb, &tuple, sock_tuple(key, &tuple), opts,
				 sizeof(*opts));
}

static __always_inline bool conntrack_has(struct __sk_buff *skb,
					  const struct flow_key *key)
{
	struct bpf_ct_opts opts = {};
	struct nf_conn *ct = conntrack_find(skb, key, &opts);
	bool confirmed;

	if (!ct)
		return false;
	confirmed = ct->status & IPS_CONFIRMED;
	bpf_ct_release(ct);
	return confirmed;
}

/* Whether replies have another source than requests have as destination. No
 * status bit tells this for IPVS. */
static __always_inline bool is_translated(const struct nf_conn *ct)
{
	const struct nf_conntrack_tuple *requests = &ct->tuplehash[0].tuple;
	const struct nf_conntrack_tuple *replies = &ct->tuplehash[1].tuple;

	return ct->status & IPS_DST_NAT ||
	       requests->dst.u.all != replies->src.u.all ||
	       requests->dst.u3.ip6[0] != replies->src.u3.ip6[0] ||
	       requests->dst.u3.ip6[1] != replies->src.u3.ip6[1] ||
	       requests->dst.u3.ip6[2] != replies->src.u3.ip6[2] ||
	       requests->dst.u3.ip6[3] != replies->src.u3.ip6[3];
}

/*
 * Whether a packet is of a connection of netfilter's or IPVS', which translates
 * its destination; or is a reply to one that began here: masqueraded
 * connections get any port from 1024 on, also one that is a NodePort.
 */
GLOBAL int netfilter_has(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_ct_opts opts = {};
	struct nf_conn *ct;
	bool has;

	if (!p)
		return false;
	ct = conntrack_find(skb, &p->key, &opts);
	if (!ct)
		return false;
	has = opts.dir == CT_REPLY || is_translated(ct);
	bpf_ct_release(ct);
	return has;
}

#endif
