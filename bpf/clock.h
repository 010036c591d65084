/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_CLOCK_H
#define TANDEM_CLOCK_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#define NSEC_PER_SEC 1000000000ULL

/* CLOCK_MONOTONIC as of the last tick (Linux 5.11). */
static __always_inline __u64 last_tick(void)
{
	return bpf_ktime_get_coarse_ns();
}

static __always_inline __u32 now_s(void)
{
	return last_tick() / NSEC_PER_SEC;
}

#endif
