/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_PACKET_SUCCESSOR_H
#define TANDEM_PACKET_SUCCESSOR_H

#include <linux/bpf.h>
#include <stdbool.h>

#include "global.h"
#include "successor.h"
#include "tc_config.h"

/* Devices with these programs are in the network namespace of the node. */
GLOBAL int seek_by_packet(struct __sk_buff *skb)
{
	return seek(skb, SEEK_BY_PACKET);
}

/* Whether packets that begin a connection are left to another kube-proxy. */
static __always_inline bool packets_yield(struct __sk_buff *skb)
{
	return has_yielded() || (is_awaited() && seek_by_packet(skb));
}

/* Whether these programs serve established connections only. */
static __always_inline bool serves_old_only(void)
{
	return draining || has_yielded();
}

#endif
