/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_NODE_H
#define TANDEM_NODE_H

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "lb_maps.h"

/* The facts about this node. */
static __always_inline const struct node *this_node(void)
{
	const __u32 zero = 0;
	const struct meta *meta = bpf_map_lookup_elem(&tdm_meta, &zero);
	__u32 index;

	if (!meta)
		return NULL;
	index = *(volatile __u32 *)&meta->node;
	return bpf_map_lookup_elem(&tdm_node, &index);
}

/* enum lb_local of an address; 0 if it is not on this node. */
static __always_inline __u32 local_flags(const __be32 *addr)
{
	const __u32 *flags = bpf_map_lookup_elem(&tdm_local, addr);

	return flags ? *flags : 0;
}

static __always_inline bool is_pod(const struct node *node, const __be32 *a)
{
	for (__u32 i = 0; i < MAX_POD_PREFIXES; i++) {
		if (i >= node->pod_prefixes)
			return false;
		if (in_prefix(&node->pods[i], a))
			return true;
	}
	return false;
}

/* This node's own address; zero if it has none. */
static __always_inline void node_addr(bool v6, __be32 *addr)
{
	const struct node *node = this_node();

	if (node)
		copy_addr(addr, v6 ? node->addr6 : node->addr4);
}

static __always_inline bool is_node_loopback(const struct node *node,
					     const __be32 *a)
{
	for (__u32 i = 0; i < MAX_LOOPBACK_PREFIXES; i++) {
		if (i >= node->loopback_prefixes)
			return false;
		if (in_prefix(&node->loopback[i], a))
			return true;
	}
	return false;
}

/* Whether an address is in a ServiceCIDR: without a frontend it is rejected. */
static __always_inline bool is_unserved(const __be32 *a)
{
	const struct node *node = this_node();

	if (!node)
		return false;
	for (__u32 i = 0; i < MAX_UNSERVED_PREFIXES; i++) {
		if (i >= node->unserved_prefixes)
			return false;
		if (in_prefix(&node->unserved[i], a))
			return true;
	}
	return false;
}

#endif
