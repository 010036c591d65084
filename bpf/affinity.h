/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_AFFINITY_H
#define TANDEM_AFFINITY_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "clock.h"
#include "lb_maps.h"

/*
 * The client's remembered backend, unless its time is up. The timeout counts
 * from the newest connection, not from the newest packet, and a change of it
 * applies to the next look: the frontend holds it, not the entry.
 *
 * The element may change hands while it is used, see check.h. It needs no
 * check: a backend counts only if it is of this service and in this set, and
 * such a one of another client is as good as any, now that ours is forgotten. A
 * time that lands in the record of another client lets it live a little longer.
 */
static __always_inline struct affinity *
affinity_lookup(const struct affinity_key *who, __u64 now, __u32 timeout)
{
	struct affinity *last = bpf_map_lookup_elem(&tdm_affinity, who);
	__s64 age;

	if (!last)
		return NULL;
	/* Negative beside a connection that began later, on another CPU. */
	age = now - last->last_ns;
	if (age > (__s64)(timeout * NSEC_PER_SEC))
		return NULL;
	return last;
}

#endif
