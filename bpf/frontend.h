/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FRONTEND_H
#define TANDEM_FRONTEND_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "check.h"
#include "lb_maps.h"

/* What a frontend leads to: a copy, since the element may change hands. */
struct frontend_ref {
	__u32 service;
	__u32 set;
	__u32 affinity;
};

enum frontend_result {
	FRONTEND_FOUND,
	FRONTEND_NONE,
	FRONTEND_RACED, /* there is one, but it was not whole: look again */
};

static __always_inline __u32 frontend_check(const struct frontend_key *key,
					    __u32 set, __u32 affinity)
{
	__u32 words[sizeof(*key) / sizeof(__u32) + 2];

	__builtin_memcpy(words, key, sizeof(*key));
	words[sizeof(*key) / sizeof(__u32)] = set;
	words[sizeof(*key) / sizeof(__u32) + 1] = affinity;
	return check_of(words, sizeof(words) / sizeof(words[0]));
}

/*
 * What is not found is not there, since user space overwrites in place
 * (BPF_F_LOCK). An ordinary update links a new element at the head of the
 * bucket and unlinks the old one: who is between the two meets neither.
 *
 * What is left are deleted elements that are used again, and values that are
 * just being copied. Against these is the check. The lock would be no help with
 * the former, and make all CPUs that dial one address write to one cache line.
 */
static __always_inline enum frontend_result
frontend_lookup(const struct frontend_key *key, struct frontend_ref *ref)
{
	const volatile struct frontend *fe =
		bpf_map_lookup_elem(&tdm_frontend, key);
	__u32 set, affinity;

	if (!fe)
		return FRONTEND_NONE;
	set = fe->set;
	affinity = fe->affinity;
	if (fe->check != frontend_check(key, set, affinity))
		return FRONTEND_RACED;
	ref->service = set / SETS_PER_SERVICE;
	ref->set = set;
	ref->affinity = affinity;
	return FRONTEND_FOUND;
}

#endif
