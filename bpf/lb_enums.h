/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_LB_ENUMS_H
#define TANDEM_LB_ENUMS_H

#include "btf_emit.h"

/*
 * Numbers in the maps of lb_maps.h. Those that processes of other versions may
 * find there keep their values for ever; another meaning of any of them is a
 * change of LAYOUT_VERSION.
 */

enum lb_layout {
	/* Identifies maps and programs of this project: "tandem". */
	LAYOUT_MAGIC = 0x6d65646e6174ULL,
	/* Of structures, enums and maps shared with user space. */
	LAYOUT_VERSION = 8,
};
BTF_EMIT(lb_layout);

/* What the address of a frontend means. */
enum lb_scope {
	SCOPE_ADDRESS = 0, /* this address */
	SCOPE_NODE = 1,	   /* every address of this node that has NodePorts; the
			    * key has the unspecified address */
	SCOPE_HOST = 2,	   /* this loopback address, for sockets in the network
			    * namespace of this node alone */
};
BTF_EMIT(lb_scope);

/* Where a connection comes from; a frontend has a route for each origin. */
enum lb_origin {
	FROM_POD = 0,
	FROM_HOST = 1,
	FROM_OUTSIDE = 2,
};
BTF_EMIT(lb_origin);

/* A route takes ROUTE_BITS of a frontend's flags, at origin * ROUTE_BITS. */
enum lb_route {
	ROUTE_LOCAL = 1 << 0,	   /* to the set of local backends */
	ROUTE_MASQUERADE = 1 << 1, /* the backend sees this node's address */
	ROUTE_ANY_SOURCE = 1 << 2, /* it may, where packets are translated */
	ROUTE_DIRECT = 1 << 3,	   /* by direct server return to backends on
				    * other nodes, which answer the client */
	ROUTE_BITS = 4,
};
BTF_EMIT(lb_route);

/* Bits of a frontend's flags above its routes. */
enum lb_frontend_flag {
	FRONTEND_FILTERED = 1 << 12, /* has loadBalancerSourceRanges */
	FRONTEND_SELF = 1 << 13,     /* the ranges admit its own address */
	/* Whom they admit of the clients whose address a socket does not tell.
	 */
	FRONTEND_ALL_PODS = 1 << 14,
	FRONTEND_SOME_PODS = 1 << 15,
	FRONTEND_HOST = 1 << 16,
	/* Packets to it are left to netfilter, connections of sockets are not.
	 */
	FRONTEND_LEFT = 1 << 17,
	/* With affinity, the hash that picks from a Maglev table is that of the
	 * client's address alone. */
	FRONTEND_BY_CLIENT = 1 << 18,
	/* Clients that the ranges do not admit are rejected, and not dropped.
	 */
	FRONTEND_REJECT = 1 << 19,
	FRONTEND_KIND_SHIFT = 24, /* from here on: enum lb_kind */
};
BTF_EMIT(lb_frontend_flag);

/* The kind of address that a frontend is; for inspection, and of NodePorts. */
enum lb_kind {
	KIND_CLUSTER_IP = 1,
	KIND_LOAD_BALANCER = 2,
	KIND_EXTERNAL_IP = 3,
	KIND_NODE_PORT = 4,
	KIND_HOST_PORT = 5,
	KIND_HOST_IP = 6,
};
BTF_EMIT(lb_kind);

/* What else than the id of a service is in a key of tdm_target, and of
 * tdm_range.
 */
enum lb_target {
	TARGET_ANY_SERVICE = 0,
	TARGET_NODE = 0x7fffffff, /* the address is that of a node; in
				   * tdm_range, of a node or of pods */
};
BTF_EMIT(lb_target);

/* A slot is a backend id and, from this bit on, the low bits of the generation
 * that it has to have. */
enum lb_slot {
	SLOT_GENERATION = 24,
	/* The kernel rounds elements of arrays up to 8 bytes. */
	SLOTS_PER_ELEMENT = 2,
};
BTF_EMIT(lb_slot);

/* A set id is service id * SETS_PER_SERVICE + enum lb_set. */
enum lb_set {
	SET_V4_CLUSTER = 0,
	SET_V4_LOCAL = 1,
	SET_V6_CLUSTER = 2,
	SET_V6_LOCAL = 3,
	SETS_PER_SERVICE = 4,
};
BTF_EMIT(lb_set);

/* What happens to connections to an empty set; stands in the base half of the
 * set word. */
enum lb_verdict {
	VERDICT_NONE = 0, /* unused set: no frontend leads to it */
	VERDICT_REJECT = 1,
	VERDICT_DROP = 2,
};
BTF_EMIT(lb_verdict);

/* What an address of one of this node's devices is used for. */
enum lb_local {
	LOCAL_ADDRESS = 1 << 0,
	LOCAL_NODE_PORTS = 1 << 1, /* NodePorts are served there */
};
BTF_EMIT(lb_local);

enum lb_backend_flag {
	BACKEND_LOCAL = 1 << 0, /* on this node */
	BACKEND_TERMINATING = 1 << 1,
	BACKEND_REMOTE = 1 << 2, /* on another node; with neither, only routes
				  * tell */
	BACKEND_DIRECT = 1 << 3, /* its node takes direct server return */
};
BTF_EMIT(lb_backend_flag);

/* State of a service id. */
enum lb_service_state {
	SERVICE_FREE = 0,
	SERVICE_PROGRAMMED = 1,
	SERVICE_NOT_PROGRAMMED = 2, /* or not as it should be: see reason */
};
BTF_EMIT(lb_service_state);

/* Why a service port is not programmed as it should be. */
enum lb_refusal {
	REFUSAL_NONE = 0,
	REFUSAL_FRONTENDS_FULL = 1,
	REFUSAL_SERVICES_FULL = 2,
	REFUSAL_BACKENDS_FULL = 3,
	REFUSAL_SLOTS_FULL = 4,
	REFUSAL_SCTP = 5, /* the protocol is not supported */
	REFUSAL_RANGES_FULL = 6,
};
BTF_EMIT(lb_refusal);

/* The ports that a kube-proxy listens on, of struct successor. */
enum lb_port {
	PORT_HEALTH = 0,
	PORT_METRICS = 1,
	SUCCESSOR_PORTS = 2,
};
BTF_EMIT(lb_port);

/* Which programs look for the sockets of a successor. */
enum lb_seeker {
	SEEK_BY_SOCKET = 0,
	SEEK_BY_PACKET = 1,
	SEEKERS = 2,
};
BTF_EMIT(lb_seeker);

#endif
