/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_POOL_H
#define TANDEM_FLOW_POOL_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "flow_record.h"
#include "global.h"
#include "tc_config.h"

#define GIVE_ATTEMPTS 16
#define TAKE_ATTEMPTS 4

/* A list of free ids: that of this CPU, or the i-th after it. */
static __always_inline struct flow_list *flow_list(__u32 i)
{
	__u32 index = (bpf_get_smp_processor_id() + i) & (flow_lists - 1);

	return bpf_map_lookup_elem(&tdm_flow_free, &index);
}

/*
 * Returns an id to the list of this CPU, a stack: the id freed last is taken
 * first, since its record is still in the cache. The count in the high half of
 * the top word prevents the ABA problem. Another CPU changes the list only if
 * it has no ids, and user space if it ends flows; then the next list is tried.
 * An id that finds none stays claimed, and user space frees it.
 */
static __always_inline void flow_give(__u32 id, struct flow *f)
{
	for (int i = 0; i < GIVE_ATTEMPTS; i++) {
		struct flow_list *list = flow_list(i);
		__u64 old, new;

		if (!list)
			break;
		old = *(volatile __u64 *)&list->top;
		new = ((old >> 32) + 1) << 32 | id;
		*(volatile __u32 *)&f->place[0] = old;
		if (__sync_val_compare_and_swap(&list->top, old, new) == old) {
			__sync_fetch_and_add(&list->used, -1);
			return;
		}
	}
	*(volatile __u64 *)&f->life |= FLOW_CLAIMED;
}

/* Takes an id from a list; 0 if it has none. */
static __always_inline __u32 flow_pop(struct flow_list *list)
{
	for (int i = 0; i < TAKE_ATTEMPTS; i++) {
		__u64 old = *(volatile __u64 *)&list->top;
		const struct flow *f;
		__u64 new;

		if (!(__u32)old)
			break;
		f = flow_of(old);
		if (!f)
			break;
		new = ((old >> 32) + 1) << 32 | *(volatile __u32 *)&f->place[0];
		if (__sync_val_compare_and_swap(&list->top, old, new) == old) {
			__sync_fetch_and_add(&list->used, 1);
			return old;
		}
	}
	return 0;
}

/* Takes an id from the list of this CPU, or one that was never used, or one
 * from another list; 0 if there is none. */
GLOBAL int flow_take(void)
{
	__u64 *fresh = flow_counter(FLOW_FRESH);
	struct flow_list *list = flow_list(0);
	__u32 id;

	if (!list || !fresh)
		return 0;
	id = flow_pop(list);
	if (id)
		return id;
	if (*(volatile __u64 *)fresh < max_flows) {
		__u64 new = __sync_fetch_and_add(fresh, 1) + 1;

		if (new < max_flows) {
			__sync_fetch_and_add(&list->used, 1);
			return new;
		}
	}
	for (__u32 i = 1; i < MAX_FLOW_LISTS && i < flow_lists; i++) {
		list = flow_list(i);
		id = list ? flow_pop(list) : 0;
		if (id)
			return id;
	}
	return 0;
}

#endif
