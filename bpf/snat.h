/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SNAT_H
#define TANDEM_SNAT_H

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "flow.h"
#include "packet.h"
#include "tc_config.h"

/* Ports that are tried for every new connection. */
#define SNAT_ATTEMPTS 32

/* backend id -> the second in which all its ports were found to be used */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 1024);
} tdm_exhausted SEC(".maps");

static __always_inline __u16 snat_port(__u32 index)
{
	for (int i = 0; i < SNAT_RANGES; i++) {
		if (index < snat_ranges[i].count)
			return snat_ranges[i].first + index;
		index -= snat_ranges[i].count;
	}
	return 0;
}

/*
 * Whether a socket of this host would get the replies: one that is connected
 * to that backend from there, or one that listens there.
 */
static __always_inline bool host_has_port(struct __sk_buff *skb,
					  const struct flow_key *reply, bool v6)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *sk;
	__u32 size;

	if (v6) {
		copy_addr(tuple.ipv6.saddr, reply->src);
		copy_addr(tuple.ipv6.daddr, reply->dst);
		tuple.ipv6.sport = reply->sport;
		tuple.ipv6.dport = reply->dport;
		size = sizeof(tuple.ipv6);
	} else {
		tuple.ipv4.saddr = reply->src[3];
		tuple.ipv4.daddr = reply->dst[3];
		tuple.ipv4.sport = reply->sport;
		tuple.ipv4.dport = reply->dport;
		size = sizeof(tuple.ipv4);
	}
	if (reply->proto == IPPROTO_TCP)
		sk = bpf_skc_lookup_tcp(skb, &tuple, size, BPF_F_CURRENT_NETNS,
					0);
	else
		sk = bpf_sk_lookup_udp(skb, &tuple, size, BPF_F_CURRENT_NETNS,
				       0);
	if (!sk)
		return false;
	bpf_sk_release(sk);
	return true;
}

/* Tries to have a flow's replies come to the port of that index. */
GLOBAL int snat_try(struct __sk_buff *skb, __u32 id, __u32 generation,
		    __u32 index)
{
	struct flow *f = flow_of(id);

	if (!f)
		return -ENOENT;
	f->reply.dport = bpf_htons(snat_port(index));
	if (host_has_port(skb, &f->reply, !is_v4(f->reply.src)))
		return -EEXIST;
	return key_insert(&f->reply, flow_word(id, generation));
}

struct snat_search {
	struct __sk_buff *skb;
	__u32 id;
	__u32 generation;
	int err;
};

static long snat_next(__u32 index, struct snat_search *s)
{
	s->err = snat_try(s->skb, s->id, s->generation, index);
	return s->err != -EEXIST;
}

/* Tries all ports; once a second, since that takes milliseconds in vain. */
static __always_inline int snat_all(struct __sk_buff *skb, __u32 backend,
				    __u32 id, __u32 generation)
{
	struct snat_search s = { skb, id, generation, -EEXIST };
	__u32 now = now_s();
	const __u32 *full = bpf_map_lookup_elem(&tdm_exhausted, &backend);

	if (!have_loop || (full && *full == now))
		return -EADDRINUSE;
	bpf_loop(snat_all_ports, snat_next, &s, 0);
	if (s.err != -EEXIST)
		return s.err;
	bpf_map_update_elem(&tdm_exhausted, &backend, &now, BPF_ANY);
	return -EADDRINUSE;
}

/*
 * Gives a flow that nobody sees yet a reply key of its own, by way of another
 * source port. The first to be tried follows from the connection, so that one
 * that was forgotten may well get the same again.
 */
static __always_inline int snat(struct __sk_buff *skb, const struct flow *f,
				__u32 id, __u32 generation)
{
	__u32 index = check_of((const __u32 *)&f->request,
			       sizeof(f->request) / sizeof(__u32));
	int err;

	index = ((__u64)index * snat_ports) >> 32;
	for (int i = 0; i < SNAT_ATTEMPTS; i++) {
		err = snat_try(skb, id, generation, index);
		if (err != -EEXIST)
			return err;
		if (++index >= snat_ports)
			index = 0;
	}
	return snat_all(skb, f->backend, id, generation);
}

#endif
