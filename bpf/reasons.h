/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_REASONS_H
#define TANDEM_REASONS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* What became of a packet; proxier/ebpf/reasons.go has the words. */
enum reason {
	FORWARD_LOCAL,	/* to a backend on this node */
	FORWARD_REMOTE, /* to a backend elsewhere */
	FORWARD_REPLY,
	FORWARD_ICMP,	/* errors about packets of these */
	ANSWER_ECHO,	/* in place of an address that no device has */
	REJECT,		/* no backend, or nobody's address */
	REJECT_NO_PORT, /* all source ports towards that backend are used */
	ERROR_TTL,	/* told the sender */
	ERROR_TOO_BIG,
	DROP_POLICY,	   /* a Local policy, and nobody here */
	DROP_SOURCE_RANGE, /* loadBalancerSourceRanges */
	DROP_NO_FLOW,	   /* no room for another flow */
	DROP_RACED,	   /* tables changed faster than they could be read */
	DROP_REWRITE,	   /* the kernel could not make the packet writable */
	DROP_NO_ROUTE,	   /* of a flow, or an error about it */
	PASS_RST,	   /* a reset of no known connection */
	PASS_NETFILTER,	   /* it translates this connection */
	PASS_FRAGMENT, /* its first one was not seen, or it is one of ICMP */
	PASS_HEADERS,  /* broken, or more than are read */
	PASS_MARTIAN,  /* for a Service, from an address that nobody has */
	PUSHED_OUT,    /* besides: a young flow that was not over went for it */
	REASONS,
};

/* reason -> packets */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, REASONS);
} tdm_reason SEC(".maps");

static __always_inline void count_reason(enum reason reason)
{
	__u32 index = reason;
	__u64 *n = bpf_map_lookup_elem(&tdm_reason, &index);

	if (n)
		*n += 1;
}

#endif
