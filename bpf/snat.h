/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SNAT_H
#define TANDEM_SNAT_H

#include <linux/bpf.h>
#include <linux/errno.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "check.h"
#include "clock.h"
#include "conntrack.h"
#include "flow_index.h"
#include "flow_record.h"
#include "global.h"
#include "host_sock.h"
#include "tc_config.h"

/* Ports that are tried first, at a distance from each other: used ports are
 * often adjacent. */
#define SNAT_ATTEMPTS 32
#define SNAT_LEAP 4241 /* a prime */

/* Ports that are tried next, one after the other, from where the last search
 * towards that backend ended. */
#define SNAT_WALK 256

struct snat_search {
	__u32 next;   /* port to start with */
	__u32 second; /* in which all ports were last tried */
};

/* backend id -> the last search for a free port */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, __u32);
	__type(value, struct snat_search);
	__uint(max_entries, 4096);
} tdm_snat SEC(".maps");

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
 * Whether replies to a port would go elsewhere: a socket of this host is
 * connected to that backend from there, or listens there, or netfilter
 * translates a connection.
 */
GLOBAL int host_has_port(struct __sk_buff *skb, const struct flow_key *reply)
{
	if (!reply)
		return true;
	return host_has_socket(skb, reply) || conntrack_has(skb, reply);
}

/* Tries to reserve the port of an index for the replies of a flow. */
GLOBAL int snat_try(struct __sk_buff *skb, __u32 id, __u32 generation,
		    __u32 index)
{
	struct flow *f = flow_of(id);
	int err;

	if (!f)
		return -ENOENT;
	f->reply.dport = bpf_htons(snat_port(index));
	if (host_has_port(skb, &f->reply))
		return -EEXIST;
	err = key_insert(flow_word(id, generation), true);
	/* Another port has another place. */
	return err == -ENOSPC ? -EEXIST : err;
}

struct snat_walk {
	struct __sk_buff *skb;
	__u32 id;
	__u32 generation;
	__u32 index;
	int err;
};

static long snat_next(__u32 i, struct snat_walk *w)
{
	if (w->index >= snat_all_ports)
		w->index = 0;
	w->err = snat_try(w->skb, w->id, w->generation, w->index++);
	return w->err != -EEXIST;
}

/*
 * Tries some ports in a row, and once a second all of them: a search takes
 * microseconds if few ports are left, and some milliseconds per second if none
 * is.
 */
static __always_inline int snat_walk(struct __sk_buff *skb, __u32 backend,
				     __u32 id, __u32 generation)
{
	struct snat_walk w = { skb, id, generation, 0, -EEXIST };
	struct snat_search search = { .second = now_s() };
	const struct snat_search *last =
		bpf_map_lookup_elem(&tdm_snat, &backend);
	__u32 ports = snat_all_ports;

	if (!have_loop)
		return -EADDRINUSE;
	if (last) {
		w.index = last->next;
		if (last->second == search.second && ports > SNAT_WALK)
			ports = SNAT_WALK;
	}
	bpf_loop(ports, snat_next, &w, 0);
	search.next = w.index;
	bpf_map_update_elem(&tdm_snat, &backend, &search, BPF_ANY);
	return w.err == -EEXIST ? -EADDRINUSE : w.err;
}

/*
 * Gives a flow that is not yet indexed a reply key of its own, by another
 * source port. The first port to be tried is a hash of the connection, so that
 * a connection whose flow was evicted is likely to get the same again.
 */
static __always_inline int snat(struct __sk_buff *skb, const struct flow *f,
				__u32 id, __u32 generation)
{
	__u32 index = check_of((const __u32 *)&f->request,
			       sizeof(f->request) / sizeof(__u32));
	int err;

	/* Other bits of the hash than those that chose the backend. */
	index *= 0x9e3779b1;
	index = ((__u64)index * snat_ports) >> 32;
	for (int i = 0; i < SNAT_ATTEMPTS; i++) {
		err = snat_try(skb, id, generation, index);
		if (err != -EEXIST)
			return err;
		index = (index + SNAT_LEAP) % snat_ports;
	}
	return snat_walk(skb, f->backend, id, generation);
}

#endif
