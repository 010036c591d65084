/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SUMMED_H
#define TANDEM_SUMMED_H

#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

/* The kernel's own structure, of which programs see no field that tells who
 * computes the checksum. */
struct sk_buff {
	__u8 ip_summed : 2;
} __attribute__((preserve_access_index));

/* Linux 6.2. */
extern void *bpf_cast_to_kern_ctx(void *skb) __ksym __weak;

/* Who computes the checksum of TCP or UDP: CHECKSUM_* of linux/skbuff.h. */
enum summed {
	SUMMED_UNKNOWN = -1, /* the kernel does not tell */
	SUMMED_NONE = 0,     /* the packet has it */
	SUMMED_CHECKED = 1,  /* the packet has it, and it is right */
	SUMMED_COMPLETE = 2, /* the same, and the kernel has a sum of the whole
			      * packet */
	SUMMED_PARTIAL = 3,  /* the device will; the packet has the sum of the
			      * addresses */
};

static __always_inline int summed_of(struct __sk_buff *skb)
{
	const struct sk_buff *own;

	if (!bpf_cast_to_kern_ctx)
		return SUMMED_UNKNOWN;
	own = bpf_cast_to_kern_ctx(skb);
	return BPF_CORE_READ_BITFIELD(own, ip_summed);
}

#endif
