/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_ROUTE_H
#define TANDEM_ROUTE_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "flow_types.h"
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

/*
 * Length on the wire of the longest packet that this one is sent as. The size
 * of a segment does not include its headers. With UFO, which no kernel sends
 * since Linux 4.14, it would include that of UDP.
 */
static __always_inline __u16 wire_len(const struct __sk_buff *skb,
				      const struct packet *p)
{
	__u16 header =
		p->key.proto == IPPROTO_UDP ? sizeof(struct udphdr) : p->l4_len;

	if (skb->gso_size)
		return p->l4 - p->l3 + header + skb->gso_size;
	return p->l3_len;
}

/* Length of the IP header that an action puts before packets. */
static __always_inline __u16 wrapper_len(const struct packet *p, __u32 action)
{
	if (action != ACTION_DIRECT)
		return 0;
	return p->v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
}

/* Length on the wire after an action. */
static __always_inline __u16 sent_len(const struct __sk_buff *skb,
				      const struct packet *p, __u32 action)
{
	return wire_len(skb, p) + wrapper_len(p, action);
}

static __always_inline long look_up(struct __sk_buff *skb,
				    struct bpf_fib_lookup *fib,
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
	return bpf_fib_lookup(skb, fib, sizeof(*fib), flags);
}

/* Looks up the route of a packet that came in here, and with FIB_SOURCE the
 * source address that this node would use. Returns BPF_FIB_LKUP_RET_*. */
static __always_inline long route(struct __sk_buff *skb,
				  struct bpf_fib_lookup *fib,
				  const struct flow_key *to, __u16 len,
				  __u32 flags)
{
	return look_up(skb, fib, to, len, skb->ifindex, flags);
}

#define LOOPBACK_IFINDEX 1

/* Looks up the route of a packet that this host sends itself. */
static __always_inline long route_of_host(struct __sk_buff *skb,
					  struct bpf_fib_lookup *fib,
					  const struct flow_key *to, __u16 len)
{
	return look_up(skb, fib, to, len, LOOPBACK_IFINDEX, 0);
}

#endif
