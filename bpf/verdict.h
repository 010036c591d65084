/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_VERDICT_H
#define TANDEM_VERDICT_H

#include "failure.h"
#include "packet.h"
#include "reasons.h"

/*
 * TCX_NEXT, or TC_ACT_UNSPEC for clsact: the packet goes on to the next
 * program, such as the CNI's. TC_ACT_OK would hide it from them.
 */
#define NEXT -1

/* What functions return besides verdicts of tc. */
enum outcome {
	NO_FLOW = 1000,
	CHOSEN,	      /* there is a backend */
	REFUSED,      /* there is none: reject it */
	NOT_ADMITTED, /* by source ranges: reject it */
	EXPIRED,      /* the TTL ends on this node */
	PAST_STACK,   /* to be redirected */
	TOO_BIG,      /* for the MTU of its route, p->mtu */
	UNREACHABLE,  /* a router says so */
};

static __always_inline int done(enum reason reason, int verdict)
{
	count_reason(reason);
	return verdict;
}

static __always_inline int fail(const struct packet *p, enum reason reason,
				int verdict)
{
	count_failure(&p->key, reason);
	return verdict;
}

#endif
