/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_PACKET_H
#define TANDEM_PACKET_H

#include <linux/in.h>
#include <linux/types.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "context.h"
#include "flow_types.h"

enum fragment {
	WHOLE,
	FIRST_FRAGMENT,
	LATER_FRAGMENT, /* has no ports */
};

enum tcp_flag {
	TCP_FIN = 0x01,
	TCP_SYN = 0x02,
	TCP_RST = 0x04,
	TCP_ACK = 0x10,
};

/* For direct server return: in IP (RFC 2003, RFC 2473), in Geneve (geneve.h),
 * or with an option (option.h). */
enum wrapped {
	BARE,
	WRAPPED, /* it came so, and is now as its client sent it */
	TO_WRAP, /* an ICMP error that goes on so, by the flow in
		  * last_wrapper() */
};

/* The parsed fields of a packet. ICMP has its type and code in place of ports.
 */
struct packet {
	struct flow_key key;
	union {
		__u32 frag_id;
		/* In XDP, which leaves fragments to tc: struct uplink.device; 0
		 * if that is not known yet. */
		__u32 device;
	};
	union {
		/* Of a packet of a flow: when the kernel's clock ticked last,
		 * in nanoseconds, modulo 2^32. */
		__u32 tick;
		__u32 mtu; /* of the route, if the packet is too big for it */
	};
	__u32 l3_len; /* from l3 on, without padding of the frame */
	__u16 l3;
	__u16 l4;
	__sum16 l3_check; /* of IPv4 */
	__u8 l4_len;	  /* of TCP, with options */
	__u8 ttl;
	__u8 tcp_flags;
	__u8 fragment; /* enum fragment */
	bool v6;
	__u8 wrapped; /* enum wrapped */
};

/* The device that a packet came in by, as routes name it. */
static __always_inline __u32 device_of(const CONTEXT *ctx,
				       const struct packet *p)
{
#ifdef TANDEM_XDP
	return p->device;
#else
	return ctx->ifindex;
#endif
}

/* Whether a packet opens a TCP connection, as far as its flags tell. */
static __always_inline bool is_opening(const struct packet *p)
{
	return p->key.proto == IPPROTO_TCP &&
	       (p->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

#endif
