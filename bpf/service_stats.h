/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SERVICE_STATS_H
#define TANDEM_SERVICE_STATS_H

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "backend.h"
#include "lb_maps.h"

/* Counts the outcome of a connection, or of a datagram that needs a backend, of
 * a client on this node or outside. */
static __always_inline void count_connection(__u32 service,
					     enum select_result result,
					     __u32 backend, bool outside)
{
	struct service_stats *s = bpf_map_lookup_elem(&tdm_svc_stats, &service);
	__u64 *b;

	if (!s)
		return;
	if (result == SELECT_REJECT)
		__sync_fetch_and_add(
			outside ? &s->outside_rejected : &s->rejected, 1);
	else if (result == SELECT_DROP)
		__sync_fetch_and_add(
			outside ? &s->outside_dropped : &s->dropped, 1);
	else if (result == SELECT_RACED)
		__sync_fetch_and_add(&s->raced, 1);
	if (result != SELECT_OK)
		return;
	__sync_fetch_and_add(
		outside ? &s->outside_connections : &s->connections, 1);
	b = bpf_map_lookup_elem(&tdm_be_stats, &backend);
	if (b)
		__sync_fetch_and_add(b, 1);
}

#endif
