/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SOCK_REPLY_H
#define TANDEM_SOCK_REPLY_H

#include <linux/bpf.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "frontend.h"
#include "lb_maps.h"
#include "node.h"
#include "sock_addr.h"
#include "udp_peer.h"

/*
 * Netfilter masquerades with any port from 1024 on, also with one that is a
 * NodePort. A server answers such a client at the node's address and that port.
 * This is no request to the NodePort, and must not be translated. Netfilter
 * knows it by conntrack; here the socket is remembered as one that received
 * from there: as a further peer that is its own Service address.
 */
static __always_inline void udp_client_key(struct bpf_sock_addr *ctx,
					   const struct peer *p,
					   struct udp_peer_key *key)
{
	key->cookie = bpf_get_socket_cookie(ctx);
	__builtin_memcpy(key->addr, p->addr, sizeof(key->addr));
	key->port = p->port;
}

/* A datagram came from p, which is no backend that the socket sent to. */
static __always_inline void note_udp_client(struct bpf_sock_addr *ctx,
					    const struct peer *p)
{
	struct frontend_key fe_key = { .scope = SCOPE_ADDRESS };
	struct udp_peer_key key = {};
	struct udp_peer self = {};
	struct frontend_ref fe;

	copy_addr(fe_key.addr, p->addr);
	if (!(local_flags(fe_key.addr) & LOCAL_NODE_PORTS))
		return;
	fe_key.port = p->port;
	fe_key.proto = IPPROTO_UDP;
	frontend_key_node(&fe_key);
	if (frontend_lookup(&fe_key, &fe) == FRONTEND_NONE)
		return;
	udp_client_key(ctx, p, &key);
	__builtin_memcpy(self.vip, p->addr, sizeof(self.vip));
	self.vip_port = p->port;
	udp_peer_update(&key, &self);
}

/* Whether a socket sends to p, a NodePort, since p has sent to it. */
static __always_inline bool is_udp_client(struct bpf_sock_addr *ctx,
					  const struct peer *p)
{
	struct udp_peer_key key = {};
	struct udp_peer self;

	udp_client_key(ctx, p, &key);
	return udp_peer_lookup(&key, &self) &&
	       same(self.vip, self.vip_port, key.addr, key.port);
}

#endif
