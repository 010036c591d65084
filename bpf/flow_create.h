/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_CREATE_H
#define TANDEM_FLOW_CREATE_H

#include <linux/bpf.h>
#include <linux/errno.h>
#include <bpf/bpf_helpers.h>

#include "addr.h"
#include "choice.h"
#include "clock.h"
#include "flow_index.h"
#include "flow_life.h"
#include "flow_maps.h"
#include "flow_pool.h"
#include "flow_record.h"
#include "global.h"
#include "lb_maps.h"
#include "masquerade.h"
#include "packet.h"
#include "snat.h"

enum flow_created {
	FLOW_MADE,
	FLOW_NO_ROOM,	/* no free id, or no kernel memory */
	FLOW_PORT_USED, /* no free source port towards that backend */
	FLOW_OUTRUN,	/* another CPU created the same flow */
};

static __always_inline const struct backend *chosen_of(__u32 id)
{
	return bpf_map_lookup_elem(&tdm_backend, &id);
}

/* Creates the flow of a new connection. */
GLOBAL int create(struct __sk_buff *skb, const struct packet *p,
		  struct choice *c)
{
	__u32 id = flow_take();
	__u32 generation, now = now_s();
	const struct backend *be;
	struct flow *f;
	__u64 word;
	int err;

	if (!p || !c)
		return FLOW_NO_ROOM;
	be = chosen_of(c->backend);

	for (int i = 0; i < ROOM_ATTEMPTS && !id; i++) {
		flow_make_room(0, false);
		id = flow_take();
	}
	f = flow_of(id);
	if (!id || !f || !be)
		return FLOW_NO_ROOM;
	generation = (f->life >> 32) + 1;
	if (!generation)
		generation = 1;
	*(volatile __u64 *)&f->life = life_of(generation, FLOW_CLAIMED);
	word = flow_word(id, generation);

	f->request = p->key;
	copy_addr(f->reply.src, be->addr);
	copy_addr(f->reply.dst, p->key.src);
	f->reply.sport = be->port;
	f->reply.dport = p->key.sport;
	f->reply.proto = p->key.proto;
	f->flags = 0;
	if (is_masqueraded(skb, p, be, c->route, &f->reply))
		f->flags = FLOW_REMOTE | FLOW_INGRESS;
	f->service = be->service;
	f->backend = c->backend;
	f->backend_generation = c->generation;
	f->seen = now;
	f->packets[0] = f->packets[1] = 0;
	f->bytes[0] = f->bytes[1] = 0;
	barrier();
	*(volatile __u64 *)&f->life = life_of(generation, FLOW_NEW);

	err = -EEXIST;
	if (!(f->flags & FLOW_INGRESS))
		err = key_insert(&f->reply, word);
	/* Or the client uses one source port for two frontends that led to one
	 * backend. */
	if (err == -EEXIST)
		err = snat(skb, f, id, generation);
	if (!err) {
		err = key_insert(&f->request, word);
		if (err)
			bpf_map_delete_elem(&tdm_flow_key, &f->reply);
	}
	if (err) {
		*(volatile __u64 *)&f->life = life_of(generation, FLOW_FREE);
		flow_give(id, f);
		if (err == -EADDRINUSE)
			return FLOW_PORT_USED;
		return err == -EEXIST ? FLOW_OUTRUN : FLOW_NO_ROOM;
	}
	f->flags |= FLOW_INDEXED;
	*(volatile __u64 *)&f->life = life_of(generation, FLOW_YOUNG);
	flow_make_room(word, false);
	c->flow = word;
	return FLOW_MADE;
}

#endif
