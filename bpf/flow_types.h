/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_TYPES_H
#define TANDEM_FLOW_TYPES_H

#include <linux/types.h>

/*
 * Flows: connections whose packets are translated. A flow is one record in an
 * array, and two keys lead to it: its packets as they arrive from the client,
 * and as they arrive from the backend. What a packet of one direction becomes
 * is the other key, turned around; so both directions are in the record, and
 * neither can be without the other.
 */

/* Source and destination of a packet, as it arrives. */
struct flow_key {
	__be32 src[4];
	__be32 dst[4];
	__be16 sport;
	__be16 dport;
	__u8 proto;
	__u8 pad[3];
};

/* Low byte of flow.life; the generation is in the high half. */
enum flow_stage {
	FLOW_FREE = 0,
	FLOW_CLAIMED = 1, /* one CPU, or user space, is rewriting it */
	FLOW_NEW = 2,	  /* whole, and about to get its keys */
	FLOW_YOUNG = 3,	  /* goes when others come, the oldest first */
	FLOW_KEPT = 4,	  /* stays until user space takes it away */
};

enum flow_flag {
	FLOW_INDEXED = 1 << 0, /* the keys lead here */
	FLOW_INGRESS = 1 << 1, /* replies come to this node's address, and are
				* translated where they arrive */
	FLOW_REMOTE = 1 << 2,  /* forwarded past the stack */
	FLOW_REPLIED = 1 << 3,
	FLOW_FIN_REQUEST = 1 << 4,
	FLOW_FIN_REPLY = 1 << 5,
	FLOW_CLOSED = 1 << 6,	   /* both FINs, or a reset */
	FLOW_ESTABLISHED = 1 << 7, /* TCP: the client answered the SYN-ACK */
};

struct flow {
	__u64 life;  /* generation << 32 | enum flow_stage */
	__u32 seen;  /* seconds of CLOCK_MONOTONIC, of the newest packet */
	__u32 flags; /* enum flow_flag */
	struct flow_key request; /* client -> frontend */
	struct flow_key reply;	 /* backend -> client, or this node */
	__u32 service;
	__u32 backend;
	__u32 backend_generation;
	__u32 next;	  /* of a free one: the id of the next free one */
	__u64 packets[2]; /* of requests, of replies */
	__u64 bytes[2];
};

/* What keys lead to: a word of id (low half) and generation (high half). */

/* Shared by all CPUs and user space, each counter in a cache line of its own.
 */
struct flow_counter {
	__u64 value;
	__u64 pad[7];
};

/* Elements of the map of flow counters. */
enum flow_count {
	FLOW_TOP,   /* the last id that was given back (low half), and how often
		     * one was taken or given (high half) */
	FLOW_FRESH, /* the next id that never was in use, if below the limit */
	FLOW_USED,  /* ids in use */
	FLOW_BORN,  /* young ever */
	FLOW_OVER,  /* over ever */
	FLOW_KEPT_TCP, /* now */
	FLOW_KEPT_UDP,
	FLOW_COUNTS,
};

_Static_assert(sizeof(struct flow_key) == 40, "flow_key");
_Static_assert(sizeof(struct flow) == 144, "flow");

#endif
