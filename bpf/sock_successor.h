/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SOCK_SUCCESSOR_H
#define TANDEM_SOCK_SUCCESSOR_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "clock.h"
#include "global.h"
#include "lb_config.h"
#include "successor.h"

GLOBAL int seek_by_socket(struct bpf_sock_addr *ctx)
{
	if (bpf_get_netns_cookie(ctx) != host_netns_cookie)
		return false;
	return seek(ctx, SEEK_BY_SOCKET);
}

/* Whether the connections of sockets are left to another kube-proxy. */
static __always_inline bool sockets_yield(struct bpf_sock_addr *ctx)
{
	return has_yielded() || (is_awaited() && seek_by_socket(ctx));
}

/*
 * Whether a process is a kube-proxy by its name. Those that are part of another
 * process have that one's name.
 */
static __always_inline bool is_named(const __u8 *comm)
{
	const char name[] = "kube-proxy";

	for (__u32 i = 0; i < sizeof(name); i++)
		if (comm[i] != (__u8)name[i])
			return false;
	return true;
}

/*
 * Notes who binds a port of a kube-proxy. A process that binds both is one. The
 * name has to do if the configuration has only one port; a port alone is no
 * proof, as a process for debugging may use it.
 */
static __always_inline void note_bind(struct bpf_sock *sk, const __be32 *addr)
{
	struct successor *s = successor();
	__u64 now, deadline = 0;
	struct port_holder *h, *other;
	__u32 tgid;

	if (!s || sk->protocol != IPPROTO_TCP || !sk->src_port)
		return;
	h = &s->holders[PORT_HEALTH];
	other = &s->holders[PORT_METRICS];
	if (h->port != sk->src_port) {
		other = h;
		h = &s->holders[PORT_METRICS];
	}
	if (h->port != sk->src_port ||
	    bpf_get_netns_cookie(sk) != host_netns_cookie)
		return;
	now = bpf_ktime_get_coarse_ns();
	tgid = bpf_get_current_pid_tgid() >> 32;
	/* The number may be another process's by now. */
	if (tgid == s->owner_tgid && now < s->owner_seen_ns + s->grace_ns)
		tgid = 0;
	copy_addr(h->addr, addr);
	h->tgid = tgid;
	if (tgid) {
		s->tgid = tgid;
		bpf_get_current_comm(s->comm, sizeof(s->comm));
		if (other->port ? other->tgid == tgid : is_named(s->comm))
			deadline = now + s->grace_ns;
	}
	*(volatile __u64 *)&s->deadline_ns = deadline;
}

#endif
