/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_LB_MAPS_H
#define TANDEM_LB_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "lb_types.h"

/*
 * The maps of both layers; docs/maps.md has owner and lifetime of each.
 * max_entries are defaults; user space sets the sizes before loading. Arrays
 * are mmap-able: user space updates a backend set by one aligned 8-byte store.
 */

/* layout and gauges; also identifies maps and programs of this project */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct meta);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
} tdm_meta SEC(".maps");

/* whether another kube-proxy takes over */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct successor);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
} tdm_successor SEC(".maps");

/* address, port, protocol, scope -> service, and its routes */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct frontend_key);
	__type(value, struct frontend);
	__uint(max_entries, 131072);
} tdm_frontend SEC(".maps");

/* service and source prefix -> 1: admitted */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct range_key);
	__type(value, __u8);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} tdm_range SEC(".maps");

/* address of one of this node's devices -> enum lb_local */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __be32[4]);
	__type(value, __u32);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} tdm_local SEC(".maps");

/* two elements: one is read, the other is written next */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct node);
	__uint(max_entries, 2);
	__uint(map_flags, BPF_F_MMAPABLE);
} tdm_node SEC(".maps");

enum ports {
	PORT_WORDS = 2 * 65536 / 64, /* of TCP, then of UDP */
};
BTF_EMIT(ports);

/* port / 64, after all words of TCP for UDP -> a bit for each port: whether
 * there are frontends, so that most packets of no Service need no lookup of one
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, PORT_WORDS);
	__uint(map_flags, BPF_F_MMAPABLE);
} tdm_port SEC(".maps");

/* set id -> base (low half) and size (high half) of its extent of slots */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, 65536 * SETS_PER_SERVICE);
	__uint(map_flags, BPF_F_MMAPABLE);
} tdm_set SEC(".maps");

/* (base + pick) / SLOTS_PER_ELEMENT -> slots (enum lb_slot) */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct slots);
	__uint(max_entries, (1 << 20) / SLOTS_PER_ELEMENT);
	__uint(map_flags, BPF_F_MMAPABLE);
} tdm_slot SEC(".maps");

/* backend id -> where it is */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct backend);
	__uint(max_entries, 1 << 19);
	__uint(map_flags, BPF_F_MMAPABLE);
} tdm_backend SEC(".maps");

/* service id -> name and state, for inspection and for the next process */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct service);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_MMAPABLE);
} tdm_service SEC(".maps");

/* service id -> connection and traffic counters */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct service_stats);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_MMAPABLE);
} tdm_svc_stats SEC(".maps");

/* backend id -> connections it was picked for */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, 1 << 19);
	__uint(map_flags, BPF_F_MMAPABLE);
} tdm_be_stats SEC(".maps");

/* client and service -> its backend */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct affinity_key);
	__type(value, struct affinity);
	__uint(max_entries, 65536);
} tdm_affinity SEC(".maps");

/* socket -> the service address that it dialled, and its backend */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__type(key, int);
	__type(value, struct sock_dest);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} tdm_sock SEC(".maps");

/* unconnected UDP socket and backend -> service address, from its second peer
 * on */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct udp_peer_key);
	__type(value, struct udp_peer);
	__uint(max_entries, 65536);
} tdm_udp_peer SEC(".maps");

/* cookie of a network namespace whose sockets are not translated -> by what */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u64);
	__type(value, __u8);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} tdm_optout SEC(".maps");

#endif
