/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_TYPES_H
#define TANDEM_FLOW_TYPES_H

#include <linux/types.h>

#include "btf_emit.h"

/*
 * A flow is a connection whose packets are translated: one record in an array,
 * and two keys that lead to it, one for packets from the client and one for
 * packets from the backend, both as they arrive. A packet of one direction is
 * translated to the other key, reversed. So one record serves both directions,
 * and neither can exist without the other.
 */

/* Source and destination of a packet on arrival. */
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
	FLOW_CLAIMED = 1, /* one CPU, or user space, is writing it */
	FLOW_NEW = 2,	  /* complete, but without its keys */
	FLOW_YOUNG = 3,	  /* may be evicted for newer flows, oldest first */
	FLOW_KEPT = 4,	  /* stays until user space removes it */
};
BTF_EMIT(flow_stage);

enum flow_flag {
	FLOW_INDEXED = 1 << 0, /* its keys are in tdm_flow_key */
	FLOW_INGRESS = 1 << 1, /* replies come to this node's address, and are
				* translated where they arrive */
	FLOW_REMOTE = 1 << 2,  /* redirected past the stack */
	FLOW_REPLIED = 1 << 3,
	FLOW_FIN_REQUEST = 1 << 4,
	FLOW_FIN_REPLY = 1 << 5,
	FLOW_CLOSED = 1 << 6,	   /* FINs of both sides, or a reset */
	FLOW_ESTABLISHED = 1 << 7, /* TCP: the client answered the SYN-ACK */
	FLOW_WAITING = 1 << 8, /* UDP without a process that serves: a request
				* was not answered yet */
};
BTF_EMIT(flow_flag);

struct flow {
	__u64 life;  /* generation << 32 | enum flow_stage */
	__u32 seen;  /* time of the newest packet: seconds of CLOCK_MONOTONIC */
	__u32 flags; /* enum flow_flag */
	struct flow_key request; /* client -> frontend */
	struct flow_key reply;	 /* backend -> client, or this node */
	__u32 service;
	__u32 backend;
	__u32 backend_generation;
	__u32 next;	  /* of a free record: id of the next free one */
	__u64 packets[2]; /* of requests, of replies */
	__u64 bytes[2];
};

/* Keys and rings hold words: flow id (low half) and generation (high half). */

/* Shared by all CPUs and user space; each has a cache line of its own. */
struct flow_counter {
	__u64 value;
	__u64 pad[7];
};

/* Elements of tdm_flow_count. */
enum flow_count {
	FLOW_TOP,   /* top of the free list: id (low half), and number of
		     * changes (high half) */
	FLOW_FRESH, /* the next id that was never used, if below the limit */
	FLOW_USED,  /* ids in use */
	FLOW_BORN,  /* flows ever created: position in the ring of the young */
	FLOW_OVER,  /* flows ever closed: position in the ring of the closed */
	FLOW_KEPT_TCP, /* kept flows at present */
	FLOW_KEPT_UDP,
	FLOW_COUNTS,
};
BTF_EMIT(flow_count);

enum flow_limit {
	/* Closed flows that are kept for late packets. Few, so that new flows
	 * get memory that is still in the cache. */
	MAX_CLOSED = 2048,
	/* Young flows that may be evicted to free one id. */
	ROOM_ATTEMPTS = 4,
};
BTF_EMIT(flow_limit);

_Static_assert(sizeof(struct flow_key) == 40, "flow_key");
_Static_assert(sizeof(struct flow) == 144, "flow");

#endif
