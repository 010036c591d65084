/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_CSUM_H
#define TANDEM_CSUM_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_helpers.h>

/*
 * For bpf_l4_csum_replace(): IPv6 has no header checksum that would offset the
 * change in a checksum that the device computed (CHECKSUM_COMPLETE). Since
 * Linux 6.16 and its stable releases; earlier kernels refuse the flag.
 */
#define CSUM_IPV6 (1ULL << 7)

static __always_inline int csum_offset(__u8 proto)
{
	switch (proto) {
	case IPPROTO_TCP:
		return offsetof(struct tcphdr, check);
	case IPPROTO_UDP:
		return offsetof(struct udphdr, check);
	}
	return 2; /* ICMP, ICMPv6 */
}

/* Corrects a checksum for a changed pseudo header. */
static __always_inline long csum_addrs(struct __sk_buff *skb, __u32 offset,
				       __s64 diff, __u64 flags, bool v6)
{
	long err;

	flags |= BPF_F_PSEUDO_HDR;
	if (v6) {
		err = bpf_l4_csum_replace(skb, offset, 0, diff,
					  flags | CSUM_IPV6);
		if (!err)
			return 0;
	}
	return bpf_l4_csum_replace(skb, offset, 0, diff, flags);
}

static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* The difference that changed words make to a sum, for the helpers that correct
 * one. */
static __always_inline __s64 sum_diff(const __be32 *old, const __be32 *new,
				      int words)
{
	__u64 sum = 0;

	for (int i = 0; i < words; i++) {
		sum += (__u64)(__u32)~old[i] + new[i];
		barrier_var(sum); /* keeps the words from being spilled */
	}
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (__u32)((sum & 0xffffffff) + (sum >> 32));
}

#endif
