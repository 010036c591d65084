/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_RECORD_H
#define TANDEM_FLOW_RECORD_H

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "flow_maps.h"

/* flow.life: generation and stage. */
static __always_inline __u64 life_of(__u32 generation, enum flow_stage stage)
{
	return (__u64)generation << 32 | stage;
}

static __always_inline __u32 stage_of(__u64 life)
{
	return life & 0xff;
}

/* What rings hold of a flow: its generation and id. */
static __always_inline __u64 flow_word(__u32 id, __u32 generation)
{
	return (__u64)generation << 32 | id;
}

static __always_inline struct flow_counter *flow_seed_counter(void)
{
	const __u32 seed = FLOW_SEED;

	return bpf_map_lookup_elem(&tdm_flow_count, &seed);
}

static __always_inline enum flow_other flow_other(void)
{
	const struct flow_counter *c = flow_seed_counter();

	return c ? *(volatile __u64 *)&c->other : OTHER_NONE;
}

/* Whether packets came with IP options of direct server return, so others of
 * their connections may come without. */
static __always_inline bool had_options(void)
{
	const struct flow_counter *c = flow_seed_counter();

	return c && *(volatile __u64 *)&c->options;
}

static __always_inline void note_option(void)
{
	struct flow_counter *c = flow_seed_counter();

	if (c && !c->options)
		c->options = 1;
}

static __always_inline __u64 *flow_counter(enum flow_count which)
{
	__u32 index = which;
	struct flow_counter *c = bpf_map_lookup_elem(&tdm_flow_count, &index);

	return c ? &c->value : NULL;
}

static __always_inline struct flow *flow_of(__u32 id)
{
	return bpf_map_lookup_elem(&tdm_flow, &id);
}

#endif
