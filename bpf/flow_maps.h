/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_MAPS_H
#define TANDEM_FLOW_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "btf_emit.h"
#include "flow_types.h"

/* Layout and sizes: see lb_maps.h. */

/* flow id -> flow; id 0 stands for none */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct flow);
	__uint(max_entries, 1 << 18);
	__uint(map_flags, BPF_F_MMAPABLE);
} tdm_flow SEC(".maps");

/* place -> entry of a flow, found by the hash of a packet's addresses and ports
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct flow_entry);
	__uint(max_entries, (1 << 20) + FLOW_NEAR - 1);
	__uint(map_flags, BPF_F_MMAPABLE);
} tdm_flow_entry SEC(".maps");

/* home / 64 -> a bit for each home: whether an entry may have its home there.
 * Much smaller than the entries, so that packets without a flow find that out
 * in the cache. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, (1 << 20) / 64);
	__uint(map_flags, BPF_F_MMAPABLE);
} tdm_flow_filter SEC(".maps");

/* Two rings of flow ids and generations: young flows in order of creation, and
 * the last MAX_CLOSED closed flows. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, (1 << 16) + 2048);
	__uint(map_flags, BPF_F_MMAPABLE);
} tdm_flow_young SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct flow_counter);
	__uint(max_entries, FLOW_COUNTS);
	__uint(map_flags, BPF_F_MMAPABLE);
} tdm_flow_count SEC(".maps");

/* CPU, modulo the number of lists -> free ids */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct flow_list);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
} tdm_flow_free SEC(".maps");

/* A backend on this node to which other nodes may send packets by direct server
 * return. The unspecified address stands for frontends, to which they may do so
 * for a while longer: until they know that no backend takes any. The nodes that
 * may are there too; the unspecified address is for all senders. */
struct target_key {
	__u32 service; /* or enum lb_target */
	__be32 addr[4];
};

/* service and address of a backend -> its id (low half) and generation (high
 * half) */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct target_key);
	__type(value, __u64);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} tdm_target SEC(".maps");

/* address of a Service that answers echo requests -> 1 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __be32[4]);
	__type(value, __u8);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} tdm_vip SEC(".maps");

#endif
