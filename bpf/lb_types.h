/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_LB_TYPES_H
#define TANDEM_LB_TYPES_H

/*
 * Structures shared with user space. Go mirrors of map keys and values are
 * generated from these; a change of any of them is a change of LAYOUT_VERSION
 * in lb_maps.h.
 *
 * Addresses are 16 bytes in network byte order; IPv4 is stored v4-mapped
 * (::ffff:a.b.c.d), so one set of maps and one path of code serve both.
 */

#include <linux/bpf.h>
#include <linux/types.h>

enum lb_scope {
	SCOPE_INTERNAL = 0, /* dialled from this node or its pods */
	SCOPE_EXTERNAL = 1, /* arriving from elsewhere */
};

/* A set id is service id * SETS_PER_SERVICE + enum lb_set. */
enum lb_set {
	SET_V4_CLUSTER = 0,
	SET_V4_LOCAL = 1,
	SET_V6_CLUSTER = 2,
	SET_V6_LOCAL = 3,
	SETS_PER_SERVICE = 4,
};

/* What an empty set says; it stands in the base half of the set word. */
enum lb_verdict {
	VERDICT_NONE = 0, /* no frontend leads here, or not any more */
	VERDICT_REJECT = 1,
	VERDICT_DROP = 2,
};

struct frontend_key {
	__be32 addr[4];
	__be16 port;
	__u8 proto; /* IPPROTO_* */
	__u8 scope; /* enum lb_scope */
};

/* The service id follows from the set's. */
struct frontend {
	__u32 set;
	__u32 affinity; /* seconds; 0: none */
	__u32 check;	/* of the key and these two, see frontend.h */
	__u32 kind;	/* for people; the data path does not read it */
	struct bpf_spin_lock lock; /* of user space, to overwrite in place */
};

struct backend {
	__be32 addr[4];
	__be16 port;
	__u8 proto;
	__u8 members; /* bit enum lb_set: in that set of the service */
	__u32 service;
	__u32 generation;
	__u32 flags; /* for people */
};

/*
 * One service port, written by user space alone: what `tandemctl` shows and
 * what a new process reads to find the ids its predecessor gave out.
 */
struct service {
	__u32 state;  /* 0 free, 1 programmed, 2 not programmed: see reason */
	__u16 reason; /* why not */
	__u8 name_len;
	__u8 proto;
	/* namespace/name:port; of a longer one, the end is a hash */
	__u8 name[120];
};

struct service_stats {
	__u64 connections; /* connects, and datagrams that picked a backend */
	__u64 rejected;
	__u64 dropped;
	__u64 raced; /* gave up re-reading a set that kept changing */
};

struct affinity_key {
	__be32 client[4]; /* address, or the netns cookie in the last 8 bytes */
	__u32 service;
	__u32 family_set; /* first set of the address family */
};

struct affinity {
	__u32 backend;
	__u32 generation;
	__u64 last_ns; /* CLOCK_MONOTONIC of the newest connection */
};

/* What the program made of this socket's destination; dies with the socket. */
struct sock_dest {
	__be32 vip[4];
	__be32 addr[4];
	__be16 vip_port;
	__be16 port;
	__u32 service;
	__u32 backend;
	__u32 generation;
	__u8 connected; /* by connect(), not by sendto() */
	__u8 proto;
	__u8 many; /* talks to other service addresses too: see udp_peer */
	__u8 pad[5];
};

/* A further peer of an unconnected UDP socket. */
struct udp_peer_key {
	__u64 cookie; /* of the socket */
	__be32 addr[4];
	__be16 port;
	__u8 pad[6];
};

struct udp_peer {
	__be32 vip[4];
	__be16 vip_port;
	__u8 pad[2];
	__u32 check; /* of the key and all before, see udp_peer.h */
};

struct meta {
	__u64 magic;
	__u32 layout;
	__u32 generation; /* first generation of the ids in these maps */
	__u32 slots_used; /* gauges: user space keeps them for its readers */
	__u32 backends_used;
	__u32 services_used;
	__u32 frontends_used;
	__u32 unplaced; /* service ports that did not fit */
	__u32 pad;
	__u64 changed_unix_ns; /* newest change of anything here */
};

_Static_assert(sizeof(struct frontend_key) == 20, "frontend_key");
_Static_assert(sizeof(struct frontend) == 20, "frontend");
_Static_assert(sizeof(struct backend) == 32, "backend");
_Static_assert(sizeof(struct service) == 128, "service");
_Static_assert(sizeof(struct affinity_key) == 24, "affinity_key");
_Static_assert(sizeof(struct sock_dest) == 56, "sock_dest");
_Static_assert(sizeof(struct udp_peer_key) == 32, "udp_peer_key");
_Static_assert(sizeof(struct udp_peer) == 24, "udp_peer");
_Static_assert(sizeof(struct meta) == 48, "meta");

#endif
