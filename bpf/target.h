/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_TARGET_H
#define TANDEM_TARGET_H

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "backend.h"
#include "flow_maps.h"
#include "wrapper.h"

/* Whether an address is that of a backend to which other nodes may send packets
 * by direct server return; the unspecified one, whether they may to frontends.
 */
static __always_inline bool is_target(const __be32 *addr)
{
	struct target_key key = {};

	copy_addr(key.addr, addr);
	return bpf_map_lookup_elem(&tdm_target, &key);
}

/* Whether an address is that of a node of the cluster, as far as nodes are
 * known.
 */
static __always_inline bool is_node_address(const __be32 *addr)
{
	struct target_key key = { .service = TARGET_NODE };

	copy_addr(key.addr, addr);
	if (bpf_map_lookup_elem(&tdm_target, &key))
		return true;
	__builtin_memset(key.addr, 0, sizeof(key.addr));
	return bpf_map_lookup_elem(&tdm_target, &key);
}

/* The backend of a service that another node selected for the packet that was
 * taken out of last_wrapper(). */
static __always_inline struct backend *target_of(__u32 service,
						 struct affinity *chosen)
{
	struct target_key key = { .service = service };
	const struct wrapper *w = last_wrapper();
	struct backend *be;
	const __u64 *at;
	__u64 word;

	if (!w)
		return NULL;
	copy_addr(key.addr, w->dst);
	at = bpf_map_lookup_elem(&tdm_target, &key);
	if (!at)
		return NULL;
	word = *(const volatile __u64 *)at;
	chosen->backend = (__u32)word;
	chosen->generation = word >> 32;
	be = backend_of(chosen->backend, chosen->generation, service);
	/* The element may have been reused for another key. */
	return be && same_addr(be->addr, w->dst) ? be : NULL;
}

#endif
