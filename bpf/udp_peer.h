/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_UDP_PEER_H
#define TANDEM_UDP_PEER_H

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "check.h"
#include "lb_maps.h"

/* A retry reads another element, or none. */
#define UDP_PEER_ATTEMPTS 4

static __always_inline __u32 udp_peer_check(const struct udp_peer_key *key,
					    const struct udp_peer *peer)
{
	__u32 words[(sizeof(*key) + offsetof(struct udp_peer, check)) /
		    sizeof(__u32)];

	__builtin_memcpy(words, key, sizeof(*key));
	__builtin_memcpy(words + sizeof(*key) / sizeof(__u32), peer,
			 offsetof(struct udp_peer, check));
	return check_of(words, sizeof(words) / sizeof(words[0]));
}

static __always_inline bool udp_peer_lookup(const struct udp_peer_key *key,
					    struct udp_peer *peer)
{
	for (int i = 0; i < UDP_PEER_ATTEMPTS; i++) {
		const struct udp_peer *at =
			bpf_map_lookup_elem(&tdm_udp_peer, key);

		if (!at)
			return false;
		*peer = *at;
		barrier(); /* check and use the same copy */
		if (peer->check == udp_peer_check(key, peer))
			return true;
	}
	return false;
}

/*
 * An identical entry is left alone: replacing it would hide it for a moment
 * from a CPU that receives a reply (see frontend_lookup()), and LRU maps cannot
 * be updated in place.
 */
static __always_inline void udp_peer_update(const struct udp_peer_key *key,
					    struct udp_peer *peer)
{
	struct udp_peer known;

	peer->check = udp_peer_check(key, peer);
	if (udp_peer_lookup(key, &known) && known.check == peer->check)
		return;
	bpf_map_update_elem(&tdm_udp_peer, key, peer, BPF_ANY);
}

#endif
