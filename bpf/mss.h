/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_MSS_H
#define TANDEM_MSS_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "csum.h"
#include "flow_types.h"
#include "global.h"
#include "length.h"
#include "packet.h"
#include "parse.h"
#include "wrapper.h"

#define TCP_OPTION_MSS 2
#define TCP_OPTION_MSS_LEN 4
/* No less than what every host has to accept (RFC 9293, 3.7.1). */
#define MIN_MSS 536

struct mss_option {
	__u8 kind;
	__u8 len;
	__be16 value;
};

/*
 * Lowers the maximum segment size in a SYN-ACK by the length of what the
 * client's node adds to packets, so that clients send nothing that is too big
 * with it. All usual systems put the option first; where it is not, the client
 * gets ICMP errors about its large packets.
 */
GLOBAL int lower_mss(struct __sk_buff *skb, const struct packet *p, __u32 flags)
{
	const __u16 taken = added_len(p && p->v6, form_of(flags));
	struct mss_option mss;
	__be16 lower;
	__u32 at;

	if (!p || p->fragment != WHOLE ||
	    p->l4_len < sizeof(struct tcphdr) + sizeof(mss))
		return 0;
	at = p->l4 + sizeof(struct tcphdr);
	if (!load(skb, at, &mss, sizeof(mss)) || mss.kind != TCP_OPTION_MSS ||
	    mss.len != TCP_OPTION_MSS_LEN ||
	    bpf_ntohs(mss.value) < MIN_MSS + taken)
		return 0;
	lower = bpf_htons(bpf_ntohs(mss.value) - taken);
	if (bpf_l4_csum_replace(skb, p->l4 + csum_offset(IPPROTO_TCP),
				mss.value, lower, sizeof(lower)))
		return -1;
	return bpf_skb_store_bytes(skb, at + offsetof(struct mss_option, value),
				   &lower, sizeof(lower), 0);
}

#endif
