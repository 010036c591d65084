/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_ROUTE_H
#define TANDEM_ROUTE_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "flow_types.h"

#define FIB_SOURCE (1U << 4) /* BPF_FIB_LOOKUP_SRC */

/*
 * Looks up the route to an address, and the source address that this node would
 * use. Returns BPF_FIB_LKUP_RET_*.
 */
static __always_inline long route(struct __sk_buff *skb,
				  struct bpf_fib_lookup *fib,
				  const struct flow_key *to, __u16 len,
				  __u32 flags)
{
	__builtin_memset(fib, 0, sizeof(*fib));
	fib->ifindex = skb->ifindex;
	fib->tot_len = len;
	fib->l4_protocol = to->proto;
	fib->sport = to->sport;
	fib->dport = to->dport;
	if (is_v4(to->dst)) {
		fib->family = AF_INET;
		fib->ipv4_src = to->src[3];
		fib->ipv4_dst = to->dst[3];
	} else {
		fib->family = AF_INET6;
		copy_addr(fib->ipv6_src, to->src);
		copy_addr(fib->ipv6_dst, to->dst);
	}
	return bpf_fib_lookup(skb, fib, sizeof(*fib), flags);
}

#endif
