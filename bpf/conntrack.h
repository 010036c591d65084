/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_CONNTRACK_H
#define TANDEM_CONNTRACK_H

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "packet.h"
#include "tc_config.h"

/*
 * The kernel's own conntrack (Linux 5.18): connections that netfilter
 * translates, as rules of another proxy, or of ours, had it do. They go on so
 * after those rules are gone.
 */

struct nf_conn {
	unsigned long status;
} __attribute__((preserve_access_index));

struct bpf_ct_opts {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};

/* Sizes and order as in the kernel, of which this is a part. */
_Static_assert(sizeof(struct bpf_ct_opts) == 12, "bpf_ct_opts");

#define CT_OWN_NETNS -1
#define IPS_CONFIRMED (1 << 3)
#define IPS_DST_NAT (1 << 5)

extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *skb,
					 struct bpf_sock_tuple *tuple,
					 __u32 tuple__sz,
					 struct bpf_ct_opts *opts,
					 __u32 opts__sz) __ksym __weak;
extern void bpf_ct_release(struct nf_conn *ct) __ksym __weak;

/* What conntrack says of the connection that packets with this key are of, as
 * they are on the wire: IPS_CONFIRMED and more, or 0 for nothing. */
static __always_inline unsigned long
conntrack_status(struct __sk_buff *skb, const struct flow_key *key)
{
	struct bpf_ct_opts opts = { .netns_id = CT_OWN_NETNS };
	struct bpf_sock_tuple tuple = {};
	unsigned long status;
	struct nf_conn *ct;

	if (!have_conntrack)
		return 0;
	opts.l4proto = key->proto;
	if (is_v4(key->src)) {
		tuple.ipv4.saddr = key->src[3];
		tuple.ipv4.daddr = key->dst[3];
		tuple.ipv4.sport = key->sport;
		tuple.ipv4.dport = key->dport;
		ct = bpf_skb_ct_lookup(skb, &tuple, sizeof(tuple.ipv4), &opts,
				       sizeof(opts));
	} else {
		copy_addr(tuple.ipv6.saddr, key->src);
		copy_addr(tuple.ipv6.daddr, key->dst);
		tuple.ipv6.sport = key->sport;
		tuple.ipv6.dport = key->dport;
		ct = bpf_skb_ct_lookup(skb, &tuple, sizeof(tuple.ipv6), &opts,
				       sizeof(opts));
	}
	if (!ct)
		return 0;
	status = ct->status;
	bpf_ct_release(ct);
	return status;
}

/* Whether netfilter translates the destination of a packet. */
GLOBAL int netfilter_has(struct __sk_buff *skb, const struct packet *p)
{
	return p && conntrack_status(skb, &p->key) & IPS_DST_NAT;
}

#endif
