/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_AFFINITY_H
#define TANDEM_AFFINITY_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "clock.h"
#include "lb_maps.h"

/*
 * The client's backend, until the affinity times out. The timeout counts from
 * the newest connection, not from the newest packet. A change of the timeout
 * applies at once, since it is stored in the frontend and not in the entry.
 *
 * The element may be reused for another key meanwhile (see check.h), but it
 * needs no check. A backend is used only if it belongs to this service and to
 * this set; then another client's backend is as good as any, as this client's
 * entry is gone. A time written to another client's entry only prolongs that.
 */
static __always_inline struct affinity *
affinity_lookup(const struct affinity_key *who, __u64 now, __u32 timeout)
{
	struct affinity *last = bpf_map_lookup_elem(&tdm_affinity, who);
	__s64 age;

	if (!last)
		return NULL;
	/* Negative if another CPU stored a later time. */
	age = now - last->last_ns;
	if (age > (__s64)(timeout * NSEC_PER_SEC))
		return NULL;
	return last;
}

#endif
