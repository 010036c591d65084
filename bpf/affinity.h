/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_AFFINITY_H
#define TANDEM_AFFINITY_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "lb_maps.h"

#define NSEC_PER_SEC 1000000000ULL

/*
 * The client's remembered backend, unless its time is up. The timeout counts
 * from the newest connection, not from the newest packet, and a change of it
 * applies to the next look: the frontend holds it, not the entry.
 */
static __always_inline struct affinity *
affinity_lookup(const struct affinity_key *who, __u64 now, __u32 timeout)
{
	struct affinity *last = bpf_map_lookup_elem(&tdm_affinity, who);

	if (!last || now - last->last_ns > timeout * NSEC_PER_SEC)
		return NULL;
	return last;
}

#endif
