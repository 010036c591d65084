/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_TYPES_H
#define TANDEM_FLOW_TYPES_H

#include <linux/types.h>

#include "btf_emit.h"

/*
 * A flow is a connection whose packets are translated. Its record has its
 * state. Two entries lead to it, one for packets from the client and one for
 * packets from the backend, both as they arrive. An entry has all that a packet
 * of an established flow needs, so that the record stays out of the cache.
 *
 * Invariants:
 * - The record is the truth. Only who claimed it (flow.life) adds and removes
 *   its entries: requests and replies, or neither.
 * - An entry is reachable if it is live, and if the bit of its place is set in
 *   entry.near of its home, the place that the hash of its key selects. Its
 *   place is less than FLOW_NEAR after its home.
 * - The bit is set after the entry is written, and cleared before its place is
 *   free, so a bit is never cleared that another entry set. A bit without an
 *   entry is harmless.
 * - No two live entries have the same key.
 * - entry.word changes with each use of the place. A reader copies what it
 *   needs, and the copy counts only if the place was not reused meanwhile. A
 *   writer changes flags by compare-and-swap of a word with the generation.
 *   Counters and times are written without that: a packet that is late by a
 *   whole flow may count for the wrong one.
 */

/* Source and destination of a packet on arrival. */
struct flow_key {
	__be32 src[4];
	__be32 dst[4];
	__be16 sport;
	__be16 dport;
	__u8 proto;
	__u8 pad[3];
} __attribute__((aligned(8)));

/* Low byte of flow.life; the generation is in the high half. */
enum flow_stage {
	FLOW_FREE = 0,
	FLOW_CLAIMED = 1, /* one CPU, or user space, is writing it */
	FLOW_NEW = 2,	  /* complete, but without its keys */
	FLOW_YOUNG = 3,	  /* may be evicted for newer flows, oldest first */
	FLOW_KEPT = 4,	  /* stays until it closes, or user space removes it */
};
BTF_EMIT(flow_stage);

/* What happens to the packets of a flow. */
enum flow_action {
	/* Requests are translated and go up the stack; replies are translated
	 * where they leave the stack. */
	ACTION_LOCAL = 1,
	/* Requests are masqueraded and redirected past the stack; replies come
	 * to this node's address, and are redirected where they arrive. */
	ACTION_SNAT = 2,
	/* Not of a Service: the source port is that of another flow towards the
	 * same backend, so the connection gets another one. Of a connection of
	 * this host, where it leaves; its replies are translated where they
	 * arrive. */
	ACTION_REMAP_OUT = 3,
	/* Likewise of a client's connection, where it arrives; its replies are
	 * translated where they leave the stack. */
	ACTION_REMAP_IN = 4,
	/* Requests are sent to the backend by direct server return: its node
	 * answers the client. There is no entry for replies. */
	ACTION_DIRECT = 5,
};
BTF_EMIT(flow_action);

enum flow_flag {
	FLOW_INDEXED = 1 << 0,	     /* its entries are in tdm_flow_entry */
	FLOW_RESET_REQUEST = 1 << 1, /* TCP: the last segment of the client
				      * was a reset */
	FLOW_RESET_REPLY = 1 << 2,   /* likewise of the backend */
	FLOW_REPLIED = 1 << 3,
	FLOW_FIN_REQUEST = 1 << 4,
	FLOW_FIN_REPLY = 1 << 5,
	FLOW_CLOSED = 1 << 6,	   /* FINs of both sides, or a reset that
				    * its receiver may accept */
	FLOW_ESTABLISHED = 1 << 7, /* TCP: the client answered the SYN-ACK */
	FLOW_WAITING = 1 << 8, /* UDP without a process that serves: a request
				* was not answered yet */
	FLOW_WRAPPED = 1 << 9, /* its first request came from another node, by
				* direct server return, as more may: in an IP
				* packet without one of the following */
	FLOW_GENEVE = 1 << 10, /* in Geneve in that */
	FLOW_OPTION = 1 << 11, /* with an IP option */
	FLOW_SPREAD = 1 << 12, /* the backend's node takes its packets from the
				* prefix of sources too */
};
BTF_EMIT(flow_flag);

struct flow {
	__u64 life;  /* generation << 32 | enum flow_stage */
	__u64 flags; /* generation << 32 | enum flow_flag */
	__u32 service;
	__u32 backend;
	__u32 backend_generation;
	__u32 seen; /* time of the newest packet: seconds of CLOCK_MONOTONIC */
	/* Places in tdm_flow_entry: for requests, for replies. Of a free
	 * record, the first is the id of the next free one. */
	__u32 place[2];
	__u32 ingress; /* index of the device of the newest request */
	__u8 action;   /* enum flow_action */
	/* Time of the first packet: the low 24 bits of what seen was then, the
	 * lowest byte first. 0 of flows of programs that did not note it. */
	__u8 created[3];
	struct flow_key request; /* client -> frontend */
	struct flow_key reply;	 /* backend -> client, or this node; of
				  * ACTION_DIRECT, to this node, but such
				  * packets do not exist */
};

/* Low byte of entry.word; enum flow_flag is above it, and the number of uses of
 * the place in the high half. */
enum entry_state {
	ENTRY_FREE = 0,
	ENTRY_CLAIMED = 1, /* one CPU, or user space, is writing it */
	ENTRY_NEW = 2,	   /* complete; not live if another one has its key */
	ENTRY_LIVE = 3,
	ENTRY_STATE = 3, /* mask of the above */
	/* For replies. */
	ENTRY_REPLY = 1 << 2,
};
BTF_EMIT(entry_state);

struct flow_entry {
	/* The first cache line. */
	__u64 word; /* uses << 32 | enum flow_flag << 8 | enum entry_state */
	struct flow_key key;
	__u32 near; /* of the place: bit i is set if the entry i places further
		     * on has its home here */
	__u32 id;
	__u32 ingress; /* as of the record */
	__u8 action;   /* as of the record */
	__u8 distance; /* of the place from its home */
	__u8 pad[2];
	/* The second one. */
	__be32 src[4]; /* addresses and ports after translation */
	__be32 dst[4];
	__be16 sport;
	__be16 dport;
	__u32 generation;
	__be32 acked; /* TCP: acknowledgement number of the newest segment */
	__u32 seen;   /* as of the record */
	__u64 packets;
	__u64 bytes;
};

/* Traffic of both directions. */
struct flow_traffic {
	__u64 packets;
	__u64 bytes;
};

/* Rings hold words: flow id (low half) and generation (high half). */

/* While flows are copied to maps of other sizes, two programs are on a device,
 * each with flows of its own. What this one has with it. */
enum flow_other {
	OTHER_NONE,
	/* An earlier program, behind this one: it gets what may be of its
	 * flows. */
	OTHER_BEHIND,
	/* A newer one, ahead of this one, whose packets pass here too. */
	OTHER_AHEAD,
};
BTF_EMIT(flow_other);

/* Shared by all CPUs and user space; each has a cache line of its own. */
struct flow_counter {
	__u64 value;
	__u64 other;   /* of FLOW_SEED: enum flow_other */
	__u64 options; /* of FLOW_SEED: 1 once packets came with IP options of
			* direct server return */
	__u64 pad[5];
};

/* Free ids, of one CPU or some. */
struct flow_list {
	__u64 top;  /* id (low half), and number of changes (high half) */
	__u64 used; /* ids taken minus ids given by these CPUs: the sum over all
		     * lists is the number of ids in use */
	__u64 pad[6];
};

/* Elements of tdm_flow_count. */
enum flow_count {
	FLOW_FRESH, /* the next id that was never used, if below the limit */
	FLOW_BORN,  /* flows ever created: position in the ring of the young */
	FLOW_OVER,  /* flows ever closed: position in the ring of the closed */
	FLOW_KEPT_TCP, /* kept flows at present */
	FLOW_KEPT_UDP,
	FLOW_SEED, /* of the hash of keys; user space sets it once */
	FLOW_COUNTS,
};
BTF_EMIT(flow_count);

enum flow_limit {
	/* Closed flows that are kept for late packets. Few, so that new flows
	 * get memory that is still in the cache. */
	MAX_CLOSED = 2048,
	/* Lists of free ids at most; a power of two. */
	MAX_FLOW_LISTS = 64,
	/* Young flows that may be evicted to free one id. */
	ROOM_ATTEMPTS = 4,
	/* Places, from its home on, where an entry may be: bits of entry.near.
	 */
	FLOW_NEAR = 32,
};
BTF_EMIT(flow_limit);

_Static_assert(sizeof(struct flow_key) == 40, "flow_key");
_Static_assert(sizeof(struct flow) == 128, "flow");
_Static_assert(sizeof(struct flow_entry) == 128, "flow_entry");

#endif
