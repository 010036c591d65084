/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_REASON_H
#define TANDEM_REASON_H

#include "btf_emit.h"

/* Packet verdict counters; proxier/ebpf/lbmap/reasons.go has their names. */
enum reason {
	FORWARD_LOCAL,	/* to a backend on this node */
	FORWARD_REMOTE, /* to a backend on another node */
	FORWARD_REPLY,
	FORWARD_ICMP,	/* an ICMP error about a translated packet */
	ANSWER_ECHO,	/* an echo request to a Service address */
	REJECT,		/* no backend, or an unallocated ClusterIP */
	REJECT_NO_PORT, /* all source ports towards that backend are in use */
	ERROR_TTL,	/* sent an ICMP error: TTL exceeded */
	ERROR_TOO_BIG,	/* sent an ICMP error: MTU exceeded */
	DROP_POLICY,	/* policy Local without local endpoints */
	DROP_SOURCE_RANGE, /* loadBalancerSourceRanges */
	DROP_NO_FLOW,	   /* the flow table is full */
	DROP_RACED,	   /* gave up after repeated inconsistent reads */
	DROP_REWRITE,	/* the kernel could not make the packet writable, or it
			 * has no room for an IP option */
	DROP_NO_ROUTE,	/* for a packet of a flow, or an error about it */
	PASS_RST,	/* a reset without a connection */
	PASS_NETFILTER, /* netfilter translates the connection */
	PASS_FRAGMENT,	/* first fragment not seen, or a fragment of ICMP */
	PASS_HEADERS,	/* broken headers, or more than are parsed */
	PASS_MARTIAN,	/* to a Service, from an invalid source address */
	PASS_NO_UPLINK, /* to a remote backend behind a device that has no
			 * programs */
	REMAP, /* a connection to no Service, to or from another source port */
	HELD_BACK,	/* of a flow, but no program translated it */
	PUSHED_OUT,	/* counts evictions: young flows that were not closed */
	FORWARD_DIRECT, /* by direct server return to a backend on another node,
			 * which answers the client */
	UNWRAP,		/* such a packet from another node */
	DROP_NO_TARGET, /* such a packet, to no frontend, or to no backend of
			 * this node where it may be for no other */
	ACCELERATED,	/* counted in addition: forwarded or dropped by XDP */
	REASONS,
};
BTF_EMIT(reason);

#endif
