/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_POOL_H
#define TANDEM_FLOW_POOL_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "flow_record.h"
#include "tc_config.h"

#define STACK_ATTEMPTS 16

/*
 * Returns an id to the free list, a stack: the id freed last is taken first,
 * since its record is still in the cache. The count in the high half of the top
 * word prevents the ABA problem. After too many collisions with other CPUs the
 * id is lost: its record stays claimed, which tells the next process to reclaim
 * it.
 */
static __always_inline void flow_give(__u32 id, struct flow *f)
{
	__u64 *top = flow_counter(FLOW_TOP);
	__u64 *used = flow_counter(FLOW_USED);

	if (!top || !used)
		return;
	for (int i = 0; i < STACK_ATTEMPTS; i++) {
		__u64 old = *(volatile __u64 *)top;
		__u64 new = ((old >> 32) + 1) << 32 | id;

		*(volatile __u32 *)&f->next = old;
		if (__sync_val_compare_and_swap(top, old, new) == old) {
			__sync_fetch_and_add(used, -1);
			return;
		}
	}
	*(volatile __u64 *)&f->life |= FLOW_CLAIMED;
}

/* Takes an id from the free list, or one that was never used; 0 if there is
 * none. */
static __always_inline __u32 flow_take(void)
{
	__u64 *top = flow_counter(FLOW_TOP);
	__u64 *fresh = flow_counter(FLOW_FRESH);
	__u64 *used = flow_counter(FLOW_USED);

	if (!top || !fresh || !used)
		return 0;
	for (int i = 0; i < STACK_ATTEMPTS; i++) {
		__u64 old = *(volatile __u64 *)top;
		const struct flow *f;
		__u64 new;

		if (!(__u32)old)
			break;
		f = flow_of(old);
		if (!f)
			return 0;
		new = ((old >> 32) + 1) << 32 | *(volatile __u32 *)&f->next;
		if (__sync_val_compare_and_swap(top, old, new) == old) {
			__sync_fetch_and_add(used, 1);
			return old;
		}
	}
	if (*(volatile __u64 *)fresh < max_flows) {
		__u64 id = __sync_fetch_and_add(fresh, 1) + 1;

		if (id < max_flows) {
			__sync_fetch_and_add(used, 1);
			return id;
		}
	}
	return 0;
}

#endif
