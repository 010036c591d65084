// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Finds packets for frontends that nothing has translated. It is the filter of
 * packet sockets, which see what reaches the stack of this node. Sockets of
 * pods send no such packet, and programs on devices translate them before. So
 * no socket of this kernel sent it, and it came in by a device without
 * programs.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "flow_maps.h"
#include "lb_maps.h"
#include "node.h"
#include "uplink.h"

char __license[] SEC("license") = "Dual BSD/GPL";

/* How much of a packet user space gets: its IP header and ports. */
#define SNAPLEN 96

#define MAX_COVERED 16

/* A filter cannot look up frontends, whose elements have a lock. So it passes
 * more than it is to find, and user space looks them up. These prefixes cover
 * all ClusterIPs; user space writes them. */
struct cover {
	__u32 prefixes;
	__u32 pad;
	struct prefix prefix[MAX_COVERED];
} covered;

/* Load-time constants: where NodePorts are allocated from. */
const volatile __u16 first_node_port = 30000;
const volatile __u16 last_node_port = 32767;

/*
 * Loads from a packet, in host byte order, from the network header on. They are
 * the fastest way for filters, which have no direct packet access. The program
 * returns 0 if the packet ends before.
 */
unsigned long long
load_byte(void *skb, unsigned long long offset) asm("llvm.bpf.load.byte");
unsigned long long
load_half(void *skb, unsigned long long offset) asm("llvm.bpf.load.half");
unsigned long long
load_word(void *skb, unsigned long long offset) asm("llvm.bpf.load.word");

/*
 * Reads where a packet goes that may be the first one of a connection. Packets
 * with IPv6 extension headers are not looked at.
 */
static __always_inline bool read_first(struct __sk_buff *skb, __be32 *to,
				       __u16 *port)
{
	bool v4 = skb->protocol == bpf_htons(ETH_P_IP);
	__u32 l4 = v4 ? (load_byte(skb, 0) & 15) * 4 : sizeof(struct ipv6hdr);
	__u8 proto = v4 ? load_byte(skb, offsetof(struct iphdr, protocol)) :
			  load_byte(skb, offsetof(struct ipv6hdr, nexthdr));

	switch (proto) {
	case IPPROTO_TCP:
		/* SYN without ACK */
		if ((load_byte(skb, l4 + 13) & 0x12) != 0x02)
			return false;
		break;
	case IPPROTO_UDP:
		break;
	default:
		return false;
	}
	if (!v4) {
		to[0] = bpf_htonl(load_word(skb, 24));
		to[1] = bpf_htonl(load_word(skb, 28));
		to[2] = bpf_htonl(load_word(skb, 32));
		to[3] = bpf_htonl(load_word(skb, 36));
	} else if (load_half(skb, offsetof(struct iphdr, frag_off)) & 0x1fff) {
		return false;
	} else {
		set_v4(to, bpf_htonl(load_word(skb,
					       offsetof(struct iphdr, daddr))));
	}
	*port = load_half(skb, l4 + offsetof(struct udphdr, dest));
	return true;
}

static __always_inline bool is_covered(const __be32 *a)
{
	for (__u32 i = 0; i < MAX_COVERED; i++) {
		if (i >= covered.prefixes)
			return false;
		if (in_prefix(&covered.prefix[i], a))
			return true;
	}
	return false;
}

static __always_inline bool is_node_port(const __be32 *a, __u16 port)
{
	return port >= first_node_port && port <= last_node_port &&
	       local_flags(a) & LOCAL_NODE_PORTS;
}

/* Returns how much of the packet user space gets: nothing in most cases. */
SEC("socket")
int tdm_arrival(struct __sk_buff *skb)
{
	__be32 to[4];
	__u16 port;

	if (skb->pkt_type != PACKET_HOST || !read_first(skb, to, &port))
		return 0;
	if (!is_covered(to) && !is_node_port(to, port) &&
	    !bpf_map_lookup_elem(&tdm_vip, to))
		return 0;
	return uplink_of(skb->ifindex) ? 0 : SNAPLEN;
}
