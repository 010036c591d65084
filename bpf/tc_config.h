/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_TC_CONFIG_H
#define TANDEM_TC_CONFIG_H

#include <linux/types.h>

#include "btf_emit.h"

/* Load-time constants of the packet programs, as in lb_config.h. */

/* Which clients are behind a device. */
enum role {
	ROLE_UPLINK = 0, /* clients outside; remote backends too, whose replies
			  * have to come to this node */
	ROLE_POD = 1,	 /* one pod, behind its own device */
};
BTF_EMIT(role);

const volatile __u8 role = ROLE_UPLINK;

/* Length of the link-layer header: 0 on devices without Ethernet headers. */
const volatile __u8 l2_len = 14;

/* Packets from this device come from a pod, whatever their source address. */
const volatile __u8 from_pod = 0;

/* Reset TCP connections whose backend was removed, instead of waiting for their
 * ends to notice. */
const volatile __u8 reset_removed = 0;

/* Lowest generation of the backends in these tables. A flow with an earlier one
 * was created with other tables, and whether its backend was removed is
 * unknown.
 */
const volatile __u32 first_generation = 0;

/* bpf_fib_lookup() returns the source address of a route (Linux 6.7). */
const volatile __u8 have_fib_source = 1;

/* bpf_loop() (Linux 5.17). */
const volatile __u8 have_loop = 1;

/* Another proxy serves new connections; these programs serve only established
 * ones. */
const volatile __u8 draining = 0;

/* Lookups in the kernel's conntrack (Linux 5.18 with BTF). */
const volatile __u8 have_conntrack = 1;

/* In what form packets of direct server return are sent. They are taken in any.
 */
enum dispatch {
	DISPATCH_IPIP = 0,   /* in IP packets */
	DISPATCH_GENEVE = 1, /* in Geneve in IP packets */
	DISPATCH_OPT = 2,    /* translated, with an IP option (option.h) */
};
BTF_EMIT(dispatch);

const volatile __u8 dispatch = DISPATCH_IPIP;

/* Source addresses of IP in IP: a prefix of each family, IPv4 first, and the
 * bits after it, in which flows differ; 0 for none. */
struct spread {
	__be32 addr[4];
	__be32 hosts[4];
};

const volatile struct spread spreads[2] = {};

/* Sizes of the flow maps. max_young is a power of two. */
const volatile __u32 max_flows = 1 << 18;
const volatile __u32 max_young = 1 << 16;
/* Lists of free ids: a power of two. */
const volatile __u32 flow_lists = 1;
/* Places that are homes of entries; FLOW_NEAR - 1 more follow them. */
const volatile __u32 max_homes = 1 << 20;
/* Makes collisions unpredictable; the same for all programs on these maps. */
const volatile __u64 flow_seed = 0;

/* Flows that are not evicted for newer ones. */
const volatile __u64 max_kept_tcp = 1 << 17;
const volatile __u64 max_kept_udp = 1 << 16;

/*
 * Source ports of masqueraded connections. The first snat_ports of them are
 * tried first; the others, which the kernel also assigns to connections of this
 * host, when those are used up.
 */
enum snat_limit {
	SNAT_RANGES = 6,
};
BTF_EMIT(snat_limit);

struct port_range {
	__u16 first;
	__u16 count;
};

const volatile struct port_range snat_ranges[SNAT_RANGES] = {
	{ 1024, 28976 }, { 61000, 4536 }, { 32768, 28232 }
};
const volatile __u32 snat_ports = 28976 + 4536;
const volatile __u32 snat_all_ports = 28976 + 4536 + 28232;

#endif
