/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_ROUTE_H
#define TANDEM_ROUTE_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "context.h"
#include "flow_types.h"
#include "length.h"
#include "packet.h"

/* The last route that was looked up: it takes too much room on the stack. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct bpf_fib_lookup);
	__uint(max_entries, 1);
} tdm_route SEC(".maps");

static __always_inline struct bpf_fib_lookup *last_route(void)
{
	const __u32 zero = 0;

	return bpf_map_lookup_elem(&tdm_route, &zero);
}

#define FIB_SOURCE (1U << 4) /* BPF_FIB_LOOKUP_SRC */

/* Whether a lookup found a route; the kernel resolves the neighbour. */
static __always_inline bool has_route(long found)
{
	return found == BPF_FIB_LKUP_RET_SUCCESS ||
	       found == BPF_FIB_LKUP_RET_NO_NEIGH;
}

static __always_inline long look_up(CONTEXT *ctx, struct bpf_fib_lookup *fib,
				    const struct flow_key *to, __u16 len,
				    __u32 ifindex, __u32 flags)
{
	__builtin_memset(fib, 0, sizeof(*fib));
	fib->ifindex = ifindex;
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
	return bpf_fib_lookup(ctx, fib, sizeof(*fib), flags);
}

/* Looks up the route of a packet that came in here, and with FIB_SOURCE the
 * source address that this node would use. Returns BPF_FIB_LKUP_RET_*. */
static __always_inline long route(CONTEXT *ctx, const struct packet *p,
				  struct bpf_fib_lookup *fib,
				  const struct flow_key *to, __u16 len,
				  __u32 flags)
{
	return look_up(ctx, fib, to, len, device_of(ctx, p), flags);
}

#define LOOPBACK_IFINDEX 1

/* Looks up the route of a packet that this host sends itself. */
static __always_inline long route_of_host(CONTEXT *ctx,
					  struct bpf_fib_lookup *fib,
					  const struct flow_key *to, __u16 len)
{
	return look_up(ctx, fib, to, len, LOOPBACK_IFINDEX, 0);
}

#endif
