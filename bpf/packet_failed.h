/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_PACKET_FAILED_H
#define TANDEM_PACKET_FAILED_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "flow_types.h"
#include "global.h"

/*
 * A packet of a Service that is not served, or a flow that is evicted, and why
 * (enum reason). tandemctl monitor attaches a program to this function, which
 * sees both; without that it does nothing.
 */
GLOBAL int packet_failed(const struct flow_key *key, __u32 reason)
{
	if (!key)
		return 0;
	/* The compiler must not drop the call. */
	asm volatile("" : : "r"(reason) : "memory");
	return 0;
}

#endif
