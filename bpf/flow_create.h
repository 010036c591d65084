/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FLOW_CREATE_H
#define TANDEM_FLOW_CREATE_H

#include <linux/bpf.h>
#include <linux/errno.h>
#include <linux/in.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "choice.h"
#include "clock.h"
#include "flow_index.h"
#include "flow_life.h"
#include "flow_maps.h"
#include "flow_pool.h"
#include "flow_record.h"
#include "flow_track.h"
#include "global.h"
#include "packet.h"
#ifndef TANDEM_XDP
#include "snat.h"
#endif
#include "spread.h"
#include "wrapper.h"

enum flow_created {
	FLOW_MADE,
	FLOW_NO_ROOM,	/* no free id, or no free place for an entry */
	FLOW_PORT_USED, /* no free source port towards that backend */
	FLOW_OUTRUN,	/* another CPU created the same flow */
};

#ifndef TANDEM_XDP
/* Removes the flow that has the replies to another one, if it has ended. */
GLOBAL int make_way(__u32 id)
{
	const struct flow *f = flow_of(id);
	const struct flow_entry *e;
	__u64 word;

	if (!f)
		return 0;
	e = entry_of(&f->reply, home_of(&f->reply), &word);
	if (e && entry_flags(word) & FLOW_CLOSED)
		flow_end(e->id, life_of(e->generation, FLOW_FREE));
	return 0;
}

/* Whether the client of a flow is told by its source port alone: segments
 * without an option do not say to which of its frontends it sent them. */
static __always_inline bool owns_port(const struct flow *f)
{
	return f->request.proto == IPPROTO_TCP && f->flags & FLOW_OPTION;
}
#endif

/* Inserts the entry for replies. */
static __always_inline int insert_reply(CONTEXT *ctx, struct flow *f,
					__u64 word)
{
	int err = -EEXIST;

	if (f->action == ACTION_DIRECT) {
		f->place[1] = 0;
		return 0;
	}
#ifndef TANDEM_XDP
	if (f->action == ACTION_LOCAL)
		err = key_insert(word, true);
	if (err == -EEXIST && f->action == ACTION_LOCAL && owns_port(f)) {
		make_way(word);
		err = key_insert(word, true);
		return err == -EEXIST ? -EADDRINUSE : err;
	}
	/* Or the client uses one source port for two frontends that led to one
	 * backend. */
	if (err == -EEXIST)
		err = snat(ctx, f, word, word >> 32);
#endif
	return err;
}

/* Creates the flow of a new connection. */
GLOBAL int create(CONTEXT *ctx, const struct packet *p, struct choice *c)
{
	__u32 id = flow_take();
	__u32 generation, now = now_s();
	struct flow *f;
	__u64 word;
	int err;

	/* XDP does not need it. Clang would have callers leave its register as
	 * it is, which the verifier refuses. */
	asm volatile("" : : "r"(ctx));
	if (!p || !c)
		return FLOW_NO_ROOM;
	for (int i = 0; i < ROOM_ATTEMPTS && !id; i++) {
		flow_make_room(0, false);
		id = flow_take();
	}
	f = flow_of(id);
	if (!id || !f)
		return FLOW_NO_ROOM;
	generation = (f->life >> 32) + 1;
	if (!generation)
		generation = 1;
	*(volatile __u64 *)&f->life = life_of(generation, FLOW_CLAIMED);
	word = flow_word(id, generation);

	f->request = p->key;
	f->reply = c->reply;
	f->flags = (__u64)generation << 32;
	f->flags |= wrapped_flags(p);
	if (c->action == ACTION_DIRECT && spreads_sources(p))
		f->flags |= FLOW_SPREAD;
	f->action = c->action;
	f->ingress = device_of(ctx, p);
	f->service = c->service;
	f->backend = c->backend;
	f->backend_generation = c->generation;
	f->seen = now;
	f->created[0] = now;
	f->created[1] = now >> 8;
	f->created[2] = now >> 16;
	barrier();
	*(volatile __u64 *)&f->life = life_of(generation, FLOW_NEW);

	err = insert_reply(ctx, f, word);
	if (!err) {
		err = key_insert(word, false);
		if (err)
			key_delete(f, id, generation, true, NULL);
	}
	if (err) {
		*(volatile __u64 *)&f->life = life_of(generation, FLOW_FREE);
		flow_give(id, f);
		if (err == -EADDRINUSE)
			return FLOW_PORT_USED;
		return err == -EEXIST ? FLOW_OUTRUN : FLOW_NO_ROOM;
	}
	/* A reply may have come before there was an entry for requests. */
	if ((__u32)__sync_fetch_and_or(&f->flags, FLOW_INDEXED) &
	    ~(WRAPPED_FLAGS | FLOW_SPREAD))
		flow_mark(id, f->life, 0, 0);
	*(volatile __u64 *)&f->life = life_of(generation, FLOW_YOUNG);
	flow_make_room(word, false);
	c->flow = word;
	return FLOW_MADE;
}

#endif
