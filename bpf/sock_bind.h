/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SOCK_BIND_H
#define TANDEM_SOCK_BIND_H

#include <linux/bpf.h>
#include <linux/errno.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "frontend.h"
#include "lb_config.h"
#include "node.h"
#include "sock_refuse.h"
#include "successor.h"

/*
 * A host process must not listen on a NodePort: packets to that port go to the
 * Service. The kernel runs the programs after an explicit bind() to a port, not
 * when it chooses the port itself.
 */
static __always_inline int may_bind(struct bpf_sock *sk, const __be32 *addr,
				    bool any)
{
	struct frontend_key key = { .port = bpf_htons(sk->src_port),
				    .proto = sk->protocol };
	enum frontend_result found;
	struct frontend_ref fe;

	if (!protect_node_ports || has_yielded() ||
	    bpf_get_netns_cookie(sk) != host_netns_cookie)
		return PROCEED;
	if (!any && !(local_flags(addr) & LOCAL_NODE_PORTS))
		return PROCEED;
	copy_addr(key.addr, addr);
	frontend_key_node(&key);
	found = frontend_lookup(&key, &fe);
	/* Container runtimes reserve the hostPorts of pods by a socket. */
	if (found == FRONTEND_NONE ||
	    (found == FRONTEND_FOUND &&
	     fe.flags >> FRONTEND_KIND_SHIFT == KIND_HOST_PORT))
		return PROCEED;
	if (have_set_retval)
		bpf_set_retval(-EADDRINUSE);
	return DENY;
}

/* A socket of the host that got a port. */
struct bound {
	__u16 port; /* host byte order */
	__u8 proto;
	__u8 pad;
};

/* Sockets of the host that got a port with frontends. If it is full, more are
 * left out: user space lists sockets from time to time as well. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 16);
} tdm_bound SEC(".maps");

/* Tells user space that a process of the host may be about to listen where a
 * Service is. */
static __always_inline void tell_bound(struct bpf_sock *sk)
{
	struct bound b = { .port = sk->src_port, .proto = sk->protocol };

	if ((b.proto == IPPROTO_TCP || b.proto == IPPROTO_UDP) &&
	    bpf_get_netns_cookie(sk) == host_netns_cookie &&
	    port_has_frontend(b.proto, b.port))
		bpf_ringbuf_output(&tdm_bound, &b, sizeof(b), 0);
}

#endif
