/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_LENGTH_H
#define TANDEM_LENGTH_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>

#include "context.h"
#include "flow_types.h"
#include "geneve.h"
#include "option.h"
#include "packet.h"
#include "tc_config.h"

/* Length of what a form of direct server return adds to a packet. */
static __always_inline __u16 added_len(bool v6, enum dispatch form)
{
	if (form == DISPATCH_OPT)
		return v6 ? sizeof(struct option_v6) : sizeof(struct option_v4);
	return (v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) +
	       (form == DISPATCH_GENEVE ? sizeof(struct geneve) : 0);
}

/* Length of what an action adds to packets, or may. */
static __always_inline __u16 wrapper_len(const struct packet *p, __u32 action)
{
	return action == ACTION_DIRECT ? added_len(p->v6, dispatch) : 0;
}

/*
 * Length on the wire of the longest packet that this one is sent as. The size
 * of a segment does not include its headers. With UFO, which no kernel sends
 * since Linux 4.14, it would include that of UDP.
 */
static __always_inline __u16 wire_len(const CONTEXT *ctx,
				      const struct packet *p)
{
#ifndef TANDEM_XDP
	__u16 header =
		p->key.proto == IPPROTO_UDP ? sizeof(struct udphdr) : p->l4_len;

	if (ctx->gso_size)
		return p->l4 - p->l3 + header + ctx->gso_size;
#endif
	return p->l3_len;
}

/* Length on the wire after an action. */
static __always_inline __u16 sent_len(const CONTEXT *ctx,
				      const struct packet *p, __u32 action)
{
	return wire_len(ctx, p) + wrapper_len(p, action);
}

#endif
