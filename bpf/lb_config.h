/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_LB_CONFIG_H
#define TANDEM_LB_CONFIG_H

#include <linux/types.h>

/*
 * Load-time constants. The verifier sees their values and prunes the branches
 * they close, so one object serves every mode and kernel.
 */

/* Cookie of the node's own network namespace. bpf_get_netns_cookie(NULL)
 * would be the initial one, which is another where a node is a container. */
const volatile __u64 host_netns_cookie = 0;

/* Translate sockets of the node's own network namespace only. */
const volatile __u8 host_namespace_only = 0;

/* Keep processes of the node's own namespace from binding NodePorts. */
const volatile __u8 protect_node_ports = 1;

/* bpf_set_retval() may be called from sock_addr programs (Linux 6.1). */
const volatile __u8 have_set_retval = 1;

#endif
