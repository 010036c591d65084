/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_TC_CONFIG_H
#define TANDEM_TC_CONFIG_H

#include <linux/types.h>

/* Load-time constants of the packet programs, as in lb_config.h. */

/* Which side of a device the clients are on. */
enum role {
	ROLE_UPLINK = 0, /* clients come in by it, and backends may be behind
			  * it: of those, replies have to be drawn here */
	ROLE_POD = 1,	 /* the client is a pod, behind its own device */
};

const volatile __u8 role = ROLE_UPLINK;

/* Bytes before the IP header: none on devices without Ethernet headers. */
const volatile __u8 l2_len = 14;

/* Pods are known by this device, not by their addresses. */
const volatile __u8 from_pod = 0;

/* Reset TCP connections whose backend is gone, instead of leaving it to their
 * ends to find out. */
const volatile __u8 reset_removed = 0;

/* Of the backends in these tables, none has an earlier generation: a flow that
 * has one began with other tables, and nothing tells whether its backend is
 * gone. */
const volatile __u32 first_generation = 0;

/* bpf_fib_lookup() tells the source address of a route (Linux 6.7). */
const volatile __u8 have_fib_source = 1;

/* bpf_loop() (Linux 5.17). */
const volatile __u8 have_loop = 1;

/* Another proxy serves already, and these programs only what they did before.
 */
const volatile __u8 draining = 0;

/* The kernel's conntrack can be asked (Linux 5.18, and BTF). */
const volatile __u8 have_conntrack = 1;

/* The sizes of the flow maps; that of the young is a power of two. */
const volatile __u32 max_flows = 1 << 18;
const volatile __u32 max_young = 1 << 16;

/*
 * Flows that are over, in case something of them still arrives. That are few,
 * so that new ones get memory that is still in the cache.
 */
#define MAX_CLOSED 2048

/* Flows that no young one pushes out. */
const volatile __u64 max_kept_tcp = 1 << 17;
const volatile __u64 max_kept_udp = 1 << 16;

/*
 * Ports for connections that get this node's address. The first snat_ports of
 * them are for everyday use; the others are also given to connections of this
 * host, and are tried when those are used up.
 */
#define SNAT_RANGES 6

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
