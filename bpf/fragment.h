/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FRAGMENT_H
#define TANDEM_FRAGMENT_H

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "check.h"
#include "global.h"
#include "packet.h"

struct fragment_key {
	__be32 src[4];
	__be32 dst[4];
	__u32 id;
	__u32 proto;
};

struct fragment_ports {
	__be16 sport;
	__be16 dport;
	__u32 check; /* of the key and the ports, see check.h */
};

/* a fragmented packet -> its ports, which are only in the first fragment */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct fragment_key);
	__type(value, struct fragment_ports);
	__uint(max_entries, 8192);
} tdm_fragment SEC(".maps");

static __always_inline __u32 fragment_check(const struct fragment_key *key,
					    const struct fragment_ports *ports)
{
	__u32 words[sizeof(*key) / sizeof(__u32) + 1];

	__builtin_memcpy(words, key, sizeof(*key));
	words[sizeof(*key) / sizeof(__u32)] = *(__u32 *)ports;
	return check_of(words, sizeof(words) / sizeof(words[0]));
}

/*
 * Stores the ports of a first fragment, or gives them to a later one. Returns
 * false if the first one has not been seen; then the fragment passes to the
 * stack, as do fragments that are out of order.
 */
GLOBAL int follow_fragment(struct packet *p)
{
	struct fragment_key key = {};
	struct fragment_ports ports;
	const struct fragment_ports *known;

	if (!p)
		return false;
	copy_addr(key.src, p->key.src);
	copy_addr(key.dst, p->key.dst);
	key.id = p->frag_id;
	key.proto = p->key.proto;
	if (p->fragment == FIRST_FRAGMENT) {
		ports.sport = p->key.sport;
		ports.dport = p->key.dport;
		ports.check = fragment_check(&key, &ports);
		bpf_map_update_elem(&tdm_fragment, &key, &ports, BPF_ANY);
		return true;
	}
	known = bpf_map_lookup_elem(&tdm_fragment, &key);
	if (!known)
		return false;
	ports = *known;
	barrier(); /* check and use the same copy */
	if (ports.check != fragment_check(&key, &ports))
		return false;
	p->key.sport = ports.sport;
	p->key.dport = ports.dport;
	return true;
}

#endif
