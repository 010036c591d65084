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

/* What a frontend's address means. */
enum lb_scope {
	SCOPE_ADDRESS = 0, /* itself */
	SCOPE_NODE = 1,	   /* unspecified: any at which NodePorts are served */
};

/* Who dials; a frontend has a route for each. */
enum lb_origin {
	FROM_POD = 0,
	FROM_HOST = 1,
	FROM_OUTSIDE = 2,
};

/* A route is ROUTE_BITS of the frontend's flags, at origin * ROUTE_BITS. */
enum lb_route {
	ROUTE_LOCAL = 1 << 0,	   /* the set of local backends */
	ROUTE_MASQUERADE = 1 << 1, /* the backend sees this node */
	ROUTE_ANY_SOURCE = 1 << 2, /* it does if packets are translated */
	ROUTE_BITS = 4,
};

enum lb_frontend_flag {
	FRONTEND_FILTERED = 1 << 12, /* source ranges guard it */
	FRONTEND_SELF = 1 << 13,     /* and let its own address in */
	/* Whom they let in of those whose address a socket does not tell. */
	FRONTEND_ALL_PODS = 1 << 14,
	FRONTEND_SOME_PODS = 1 << 15,
	FRONTEND_HOST = 1 << 16,
	FRONTEND_KIND_SHIFT = 24, /* for people */
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

struct frontend {
	__u32 service;
	__u32 flags;	/* enum lb_frontend_flag, and the routes */
	__u32 affinity; /* seconds; 0: none */
	__u32 check;	/* of the key and these three, see frontend.h */
	struct bpf_spin_lock lock; /* of user space, to overwrite in place */
};

/* Source ranges of a service's load balancer IPs. */
struct range_key {
	__u32 prefix_len; /* in bits, the service's 32 included */
	__u32 service;
	__be32 addr[4];
};

/* What an address of one of this node's devices is good for. */
enum lb_local {
	LOCAL_ADDRESS = 1 << 0,
	LOCAL_NODEPORTS = 1 << 1, /* NodePorts are served there */
};

struct prefix {
	__be32 addr[4];
	__be32 mask[4];
};

#define MAX_POD_PREFIXES 4
#define MAX_LOOPBACK_PREFIXES 8
#define MAX_UNSERVED_PREFIXES 16

/* What all frontends of this node have in common. */
struct node {
	__u32 pod_prefixes;
	__u32 loopback_prefixes;
	__u32 unserved_prefixes;
	__u32 pad;
	struct prefix pods[MAX_POD_PREFIXES];
	/* Loopback addresses at which this host reaches NodePorts. */
	struct prefix loopback[MAX_LOOPBACK_PREFIXES];
	/* Where what is no frontend is rejected. */
	struct prefix unserved[MAX_UNSERVED_PREFIXES];
	__be32 addr4[4]; /* its own; zero for none */
	__be32 addr6[4];
};

struct backend {
	__be32 addr[4];
	__be16 port;
	__u8 proto;
	__u8 members; /* bit enum lb_set: in that set of the service */
	__u32 service;
	__u32 generation;
	__u32 flags; /* enum lb_backend_flag */
};

enum lb_backend_flag {
	BACKEND_LOCAL = 1 << 0, /* on this node */
	BACKEND_TERMINATING = 1 << 1,
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

/* The first element counts what belongs to no service, or not any more. */
struct service_stats {
	__u64 connections; /* connects, and datagrams that picked a backend */
	__u64 rejected;
	__u64 dropped;
	__u64 raced;   /* gave up re-reading a set that kept changing */
	__u64 packets; /* of flows that ended; the others are in their flows */
	__u64 bytes;
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
	__u8 many;    /* talks to other service addresses too: see udp_peer */
	__u8 guarded; /* source ranges are asked when it sends */
	__u8 pad[4];
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
	__u8 guarded;
	__u8 pad;
	__u32 service;
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
	__u32 unplaced;	       /* service ports that did not fit */
	__u32 node;	       /* which element of the node map counts */
	__u64 changed_unix_ns; /* newest change of anything here */
};

_Static_assert(sizeof(struct frontend_key) == 20, "frontend_key");
_Static_assert(sizeof(struct frontend) == 20, "frontend");
_Static_assert(sizeof(struct range_key) == 24, "range_key");
_Static_assert(sizeof(struct node) == 16 + 28 * 32 + 32, "node");
_Static_assert(sizeof(struct backend) == 32, "backend");
_Static_assert(sizeof(struct service) == 128, "service");
_Static_assert(sizeof(struct affinity_key) == 24, "affinity_key");
_Static_assert(sizeof(struct sock_dest) == 56, "sock_dest");
_Static_assert(sizeof(struct udp_peer_key) == 32, "udp_peer_key");
_Static_assert(sizeof(struct udp_peer) == 28, "udp_peer");
_Static_assert(sizeof(struct meta) == 48, "meta");

#endif
