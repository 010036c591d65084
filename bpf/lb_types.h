/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_LB_TYPES_H
#define TANDEM_LB_TYPES_H

/*
 * Structures shared with user space, for which Go types are generated. A change
 * of any of them is a change of LAYOUT_VERSION in lb_enums.h.
 *
 * Addresses have 16 bytes in network byte order; IPv4 is v4-mapped
 * (::ffff:a.b.c.d), so one set of maps and one code path serve both families.
 */

#include <linux/bpf.h>
#include <linux/types.h>

#include "lb_enums.h"

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
	struct bpf_spin_lock lock; /* for in-place updates by user space */
};

/* Source ranges of a service's load balancer IPs. */
struct range_key {
	__u32 prefix_len; /* in bits, including the 32 of the service */
	__u32 service;
	__be32 addr[4];
};

struct prefix {
	__be32 addr[4];
	__be32 mask[4];
};

#define MAX_POD_PREFIXES 4
#define MAX_LOOPBACK_PREFIXES 8
#define MAX_UNSERVED_PREFIXES 16

/* Facts about this node that concern all frontends. */
struct node {
	__u32 pod_prefixes;
	__u32 loopback_prefixes;
	__u32 unserved_prefixes;
	__u32 pad;
	struct prefix pods[MAX_POD_PREFIXES];
	/* Loopback addresses where processes of this host reach NodePorts. */
	struct prefix loopback[MAX_LOOPBACK_PREFIXES];
	/* ServiceCIDRs: addresses without a frontend are rejected. */
	struct prefix unserved[MAX_UNSERVED_PREFIXES];
	__be32 addr4[4]; /* the node's own address; zero for none */
	__be32 addr6[4];
};

struct backend {
	__be32 addr[4];
	__be16 port;
	__u8 proto;
	__u8 members; /* bit enum lb_set: it is in that set of the service */
	__u32 service;
	__u32 generation;
	__u32 flags; /* enum lb_backend_flag */
};

/*
 * One service port. Only user space uses it: `tandemctl` shows it, and a new
 * process learns from it which ids its predecessor assigned.
 */
struct service {
	__u32 state;  /* enum lb_service_state */
	__u16 reason; /* enum lb_refusal */
	__u8 name_len;
	__u8 proto;
	/* namespace/name:port; the end of a longer name is a hash */
	__u8 name[120];
};

/* The first element counts what belongs to no service, or to one that was
 * removed. */
struct service_stats {
	/* Of clients on this node. */
	__u64 connections; /* calls of connect, and datagrams that got a backend
			    */
	__u64 rejected;
	__u64 dropped;
	__u64 raced;   /* of all clients: gave up after repeated inconsistent
			  reads */
	__u64 packets; /* of ended flows; active flows have their own counters
			*/
	__u64 bytes;
	/* TCP flows that were never established: a backend answered by a
	 * reset, or not at all */
	__u64 refused;
	__u64 unanswered;
	/* Of clients outside. */
	__u64 outside_connections;
	__u64 outside_rejected;
	__u64 outside_dropped;
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

/* How the destination of a socket was translated; lives as long as the socket.
 */
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
	__u8 many;    /* has further peers: see udp_peer */
	__u8 guarded; /* source ranges are checked per packet */
	/* When it was translated: seconds of CLOCK_MONOTONIC. 0 of sockets of
	 * programs that did not note it. */
	__u32 created;
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
	__u32 check; /* of the key and the fields above, see udp_peer.h */
};

/* Who listens on a port of a kube-proxy in the network namespace of the node.
 */
struct port_holder {
	__be32 addr[4]; /* that it is bound to */
	__u32 tgid; /* in the initial pid namespace; 0: no process, or the owner
		     */
	__u16 port; /* host byte order; 0: not used by this configuration */
	__u16 pad;
};

/*
 * Another kube-proxy that takes over while no process of this project runs. All
 * times are CLOCK_MONOTONIC in nanoseconds. Programs write what they see; the
 * owner, which is the process that writes the other maps, writes the rest.
 */
struct successor {
	__u64 yielded_ns; /* new connections are left alone since then; 0: no */
	__u64 deadline_ns; /* yield then, if it is still there; 0: there is none
			    */
	__u64 grace_ns;	   /* how long it has to be there; 0: never yield */
	__u64 owner_seen_ns; /* when the owner was alive, to a second */
	__u32 owner_tgid;    /* in the initial pid namespace */
	__u32 tgid;	     /* of the successor */
	__u8 comm[16];	     /* of the successor */
	__u64 sought_ns[SEEKERS];
	struct port_holder holders[SUCCESSOR_PORTS];
};

struct slots {
	__u32 at[SLOTS_PER_ELEMENT];
};

struct meta {
	__u64 magic;
	__u32 layout;
	__u32 generation; /* lowest generation of the ids in these maps */
	__u32 slots_used; /* gauges, kept by user space */
	__u32 backends_used;
	__u32 services_used;
	__u32 frontends_used;
	__u32 unplaced;	       /* service ports over capacity */
	__u32 node;	       /* the element of tdm_node that is read */
	__u64 changed_unix_ns; /* time of the newest change */
	/* what maps may become: all in bytes, 0 for any number, and entries of
	 * each */
	__u64 bytes_limit;
	__u32 frontends_limit;
	__u32 services_limit;
	__u32 backends_limit;
	__u32 slots_limit;
	__u32 affinity_limit;
	__u32 udp_peers_limit;
	__u32 flows_limit;
	__u32 pad;
};

_Static_assert(sizeof(struct frontend_key) == 20, "frontend_key");
_Static_assert(sizeof(struct frontend) == 20, "frontend");
_Static_assert(sizeof(struct range_key) == 24, "range_key");
_Static_assert(sizeof(struct node) == 16 + 28 * 32 + 32, "node");
_Static_assert(sizeof(struct backend) == 32, "backend");
_Static_assert(sizeof(struct slots) == 8, "slots");
_Static_assert(sizeof(struct service) == 128, "service");
_Static_assert(sizeof(struct affinity_key) == 24, "affinity_key");
_Static_assert(sizeof(struct sock_dest) == 56, "sock_dest");
_Static_assert(sizeof(struct udp_peer_key) == 32, "udp_peer_key");
_Static_assert(sizeof(struct udp_peer) == 28, "udp_peer");
_Static_assert(sizeof(struct port_holder) == 24, "port_holder");
_Static_assert(sizeof(struct successor) == 120, "successor");
_Static_assert(sizeof(struct meta) == 88, "meta");

#endif
