/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SOCK_BIND_H
#define TANDEM_SOCK_BIND_H

#include <linux/bpf.h>
#include <linux/errno.h>
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

#endif
