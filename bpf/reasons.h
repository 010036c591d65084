/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_REASONS_H
#define TANDEM_REASONS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "reason.h"

/* enum reason -> packets */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, REASONS);
} tdm_reason SEC(".maps");

static __always_inline void count_reason(enum reason reason)
{
	__u32 index = reason;
	__u64 *n = bpf_map_lookup_elem(&tdm_reason, &index);

	if (n)
		*n += 1;
}

#endif
