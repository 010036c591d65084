/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SUCCESSOR_H
#define TANDEM_SUCCESSOR_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "clock.h"
#include "lb_maps.h"

/*
 * The process of this project may be gone for good, and another kube-proxy in
 * its place, whose rules these programs would bypass. So new connections are
 * left alone once another process has held the ports of a kube-proxy for a
 * while. Only a process of this project changes that again. Established
 * connections continue.
 *
 * sock_bind.h sees the process when it binds the ports. That it still listens
 * is checked when the time is up: no hook tells when an MPTCP listener is
 * closed, and one that sees every socket go would cost every connection.
 */
static __always_inline struct successor *successor(void)
{
	const __u32 zero = 0;

	return bpf_map_lookup_elem(&tdm_successor, &zero);
}

/* Whether new connections are left to another kube-proxy. */
static __always_inline bool has_yielded(void)
{
	const struct successor *s = successor();

	return s && *(volatile __u64 *)&s->yielded_ns;
}

static __always_inline bool is_awaited(void)
{
	const struct successor *s = successor();

	return s && *(volatile __u64 *)&s->deadline_ns;
}

/* Whether a socket listens on a port, in the network namespace of ctx. */
static __always_inline bool is_held(void *ctx, const struct port_holder *h)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *sk;
	__u32 size;

	if (is_v4(h->addr)) {
		size = sizeof(tuple.ipv4);
		tuple.ipv4.daddr = h->addr[3];
		if (!tuple.ipv4.daddr)
			tuple.ipv4.daddr = bpf_htonl(INADDR_LOOPBACK);
		tuple.ipv4.dport = bpf_htons(h->port);
	} else {
		size = sizeof(tuple.ipv6);
		copy_addr(tuple.ipv6.daddr, h->addr);
		if (!(h->addr[0] | h->addr[1] | h->addr[2] | h->addr[3]))
			tuple.ipv6.daddr[3] = bpf_htonl(1);
		tuple.ipv6.dport = bpf_htons(h->port);
	}
	sk = bpf_sk_lookup_tcp(ctx, &tuple, size, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	bpf_sk_release(sk);
	return true;
}

/*
 * Yields if the time is up, the owner is gone and the successor still listens.
 * ctx belongs to the network namespace of the node. Sockets and packets seek at
 * most once a second each: those of one may never find what those of the other
 * find, as on a device of a VRF.
 */
static __always_inline bool seek(void *ctx, enum lb_seeker who)
{
	struct successor *s = successor();
	__u64 now = bpf_ktime_get_coarse_ns();

	if (!s || !s->grace_ns || now < s->deadline_ns ||
	    now < s->owner_seen_ns + s->grace_ns ||
	    now < s->sought_ns[who] + NSEC_PER_SEC)
		return false;
	s->sought_ns[who] = now;
	for (int i = 0; i < SUCCESSOR_PORTS; i++)
		if (s->holders[i].port && !is_held(ctx, &s->holders[i]))
			return false;
	*(volatile __u64 *)&s->yielded_ns = now;
	return true;
}

#endif
