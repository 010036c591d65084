/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SOCK_DEST_H
#define TANDEM_SOCK_DEST_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "lb_maps.h"
#include "sock_addr.h"
#include "udp_peer.h"

/* What a socket dialled, and what it got; NULL if it was not translated. */
static __always_inline struct sock_dest *dest_of(struct bpf_sock *sk)
{
	if (!sk)
		return NULL;
	return bpf_sk_storage_get(&tdm_sock, sk, NULL, 0);
}

/* From here on the peer of a socket that connects is the address that it
 * dialled. */
static __always_inline void forget(struct bpf_sock *sk,
				   const struct sock_dest *old, bool connecting)
{
	if (connecting && old && sk)
		bpf_sk_storage_delete(&tdm_sock, sk);
}

/*
 * Records the destination of a socket. Only an unconnected socket can send to a
 * second service address while replies from the first are still on their way;
 * its further peers go to the LRU map. Returns false if the kernel gives the
 * socket no storage: a process can use up the memory for options of its socket.
 */
static __always_inline bool remember(struct bpf_sock_addr *ctx,
				     struct bpf_sock *sk, struct sock_dest *old,
				     struct sock_dest *dest)
{
	struct udp_peer_key key = {};
	struct udp_peer value = {};

	if (!old) {
		if (!sk)
			return false;
		old = bpf_sk_storage_get(&tdm_sock, sk, dest,
					 BPF_SK_STORAGE_GET_F_CREATE);
		if (!old)
			return false;
	}
	/*
	 * Replies of the previous backend are no longer expected. If two
	 * service addresses led to one backend, its replies cannot be told
	 * apart; they are attributed to the newest request.
	 */
	if (dest->connected ||
	    same(old->vip, old->vip_port, dest->vip, dest->vip_port) ||
	    same(old->addr, old->port, dest->addr, dest->port)) {
		dest->many = dest->connected ? 0 : old->many;
		*old = *dest;
		return true;
	}
	key.cookie = bpf_get_socket_cookie(ctx);
	copy_addr(key.addr, dest->addr);
	key.port = dest->port;
	__builtin_memcpy(value.vip, dest->vip, sizeof(value.vip));
	value.vip_port = dest->vip_port;
	value.service = dest->service;
	value.guarded = dest->guarded;
	udp_peer_update(&key, &value);
	old->many = 1;
	return true;
}

#endif
