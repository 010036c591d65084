/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_UPLINK_H
#define TANDEM_UPLINK_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "btf_emit.h"

/* How a packet is redirected to a device. */
enum uplink_redirect {
	/* To a next hop that this program looked up. */
	REDIRECT_NEXT_HOP = 0,
	/* By the kernel's own lookup. Tunnels without a fixed remote end drop
	 * what has no route attached (ip_tunnel_xmit()). */
	REDIRECT_ROUTE = 1,
};
BTF_EMIT(uplink_redirect);

/* A device that connects to clients and other nodes. */
struct uplink {
	__u8 redirect; /* enum uplink_redirect */
	/* Whether it sends what XDP programs of other devices redirect to it.
	 */
	__u8 xdp_target;
	__u8 mac[6]; /* of the device, for XDP */
	/* The device itself. XDP programs of a bond run on its members, which
	 * have an entry like this one: routes name the bond. */
	__u32 device;
	/* Source of what this node sends there; zero for none. */
	__be32 addr4[4];
	__be32 addr6[4];
};

_Static_assert(sizeof(struct uplink) == 44, "uplink");

/* index of a device that connects to clients and other nodes, or of a member of
 * one that is in use -> its properties */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u32);
	__type(value, struct uplink);
	__uint(max_entries, 256);
} tdm_uplink SEC(".maps");

static __always_inline const struct uplink *uplink_of(__u32 ifindex)
{
	return bpf_map_lookup_elem(&tdm_uplink, &ifindex);
}

#endif
