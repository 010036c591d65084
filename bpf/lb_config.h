/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_LB_CONFIG_H
#define TANDEM_LB_CONFIG_H

#include <linux/types.h>

/* Load-time constants. The verifier sees their values and prunes branches that
 * they exclude, so one object serves every mode and kernel. */

/* Cookie of the network namespace of the node. bpf_get_netns_cookie(NULL) would
 * return the initial one, which differs if the node is a container. */
const volatile __u64 host_netns_cookie = 0;

/* Do not translate sockets of pods, or of the network namespace of the node:
 * another proxy, or another datapath of this one, serves them. */
const volatile __u8 left_pods = 0;
const volatile __u8 left_host = 0;

/*
 * Keep processes in the network namespace of the node from binding NodePorts.
 */
const volatile __u8 protect_node_ports = 1;

/* Remember what TCP sockets dialled, for getpeername(). */
const volatile __u8 remember_tcp = 1;

/* bpf_set_retval() in sock_addr programs (Linux 6.1). */
const volatile __u8 have_set_retval = 1;

#endif
