/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SOCK_REFUSE_H
#define TANDEM_SOCK_REFUSE_H

#include <linux/bpf.h>
#include <linux/errno.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "global.h"
#include "lb_config.h"
#include "service_stats.h"
#include "sock_addr.h"

/* What a program on the cgroup returns to the kernel. */
#define DENY 0
#define PROCEED 1

/*
 * A connection or datagram that is refused, and why. tandemctl monitor attaches
 * a program to this function, which sees both; without that it does nothing.
 */
GLOBAL int connection_failed(const struct peer *to, __u32 proto, __u32 result)
{
	if (!to)
		return 0;
	/* The compiler must not drop the call. */
	asm volatile("" : : "r"(proto), "r"(result) : "memory");
	return 0;
}

/*
 * Refuses a connection or datagram that has no backend: a packet to the service
 * address would never be answered. A rejected one fails with ECONNREFUSED, and
 * a dropped one with EPERM, as if a local firewall had dropped its packet.
 * Before Linux 6.1 a program cannot choose the error, so a rejected connection
 * is sent to loopback port 0, where nothing can listen.
 */
static __always_inline int refuse(struct peer *p, __u32 proto,
				  enum select_result result)
{
	connection_failed(p, proto, result);
	if (result == SELECT_DROP)
		return DENY;
	if (have_set_retval) {
		bpf_set_retval(-ECONNREFUSED);
		return DENY;
	}
	if (is_v4(p->addr)) {
		p->addr[3] = bpf_htonl(INADDR_LOOPBACK);
	} else {
		p->addr[0] = p->addr[1] = p->addr[2] = 0;
		p->addr[3] = bpf_htonl(1);
	}
	p->port = 0;
	return PROCEED;
}

#endif
