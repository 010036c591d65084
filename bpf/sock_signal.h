/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_SOCK_SIGNAL_H
#define TANDEM_SOCK_SIGNAL_H

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "backend.h"
#include "btf_emit.h"
#include "lb_maps.h"
#include "sock_dest.h"

/* All but the last one have an upper bound. */
enum signal_buckets {
	SIGNAL_BUCKETS = 14,
};
BTF_EMIT(signal_buckets);

/* Set by user space. */
const volatile __u32 signal_bounds_us[SIGNAL_BUCKETS - 1];

struct signal_histogram {
	__u64 sum_us;
	__u64 buckets[SIGNAL_BUCKETS];
};

/* What TCP connections of sockets of this node to a service port came to. */
struct service_signals {
	__u64 established;
	__u64 refused;	  /* by a reset, before they were established */
	__u64 unanswered; /* timed out, unreachable or given up */
	__u64 sent;	  /* bytes of ended connections */
	__u64 received;
	struct signal_histogram connect; /* until established */
	struct signal_histogram rtt;	 /* smoothed, of ended connections */
};

/* Service ports with signals of their own. The others share those of id 0. */
#define MAX_SIGNALS 1024

/* service id -> signals */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u32);
	__type(value, struct service_signals);
	__uint(max_entries, MAX_SIGNALS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} tdm_signals SEC(".maps");

static const struct service_signals no_signals;

static __always_inline struct service_signals *signals_of(__u32 service)
{
	struct service_signals *s = bpf_map_lookup_elem(&tdm_signals, &service);

	if (s)
		return s;
	/* If the map is full, or another CPU was faster, that is no error. */
	bpf_map_update_elem(&tdm_signals, &service, &no_signals, BPF_NOEXIST);
	s = bpf_map_lookup_elem(&tdm_signals, &service);
	if (s || !service)
		return s;
	service = 0;
	return bpf_map_lookup_elem(&tdm_signals, &service);
}

static __always_inline void observe(struct signal_histogram *h, __u64 us)
{
	__u32 i;

	for (i = 0; i < SIGNAL_BUCKETS - 1; i++)
		if (us <= signal_bounds_us[i])
			break;
	__sync_fetch_and_add(&h->sum_us, us);
	__sync_fetch_and_add(&h->buckets[i], 1);
}

/* The signals of the service port that a TCP socket reached; NULL if it
 * reached none, or if that is gone. */
static __always_inline struct service_signals *
signals_of_socket(struct bpf_sock_ops *ctx)
{
	struct sock_dest *dest = dest_of(ctx->sk);

	if (!dest || !dest->connected ||
	    !backend_of(dest->backend, dest->generation, dest->service))
		return NULL;
	return signals_of(dest->service);
}

/* The first SYN is sent again after a second, and the next ones after twice
 * the time of the one before (RFC 6298). The kernel measures the round trip of
 * the one that was answered. */
#define INITIAL_RTO_US 1000000ULL
#define MAX_SYN_RETRIES 16

static __always_inline __u64 connect_us(const struct bpf_sock_ops *ctx)
{
	__u32 again = ctx->total_retrans;

	if (again > MAX_SYN_RETRIES)
		again = MAX_SYN_RETRIES;
	return (ctx->srtt_us >> 3) + ((1ULL << again) - 1) * INITIAL_RTO_US;
}

static __always_inline void signal_established(struct bpf_sock_ops *ctx)
{
	struct service_signals *s = signals_of_socket(ctx);

	if (!s)
		return;
	__sync_fetch_and_add(&s->established, 1);
	observe(&s->connect, connect_us(ctx));
}

static __always_inline void signal_ended(struct bpf_sock_ops *ctx)
{
	struct service_signals *s = signals_of_socket(ctx);

	if (!s)
		return;
	if (ctx->args[0] == BPF_TCP_SYN_SENT) {
		/* Without any segment, it was no reset. */
		__sync_fetch_and_add(
			ctx->segs_in ? &s->refused : &s->unanswered, 1);
		return;
	}
	__sync_fetch_and_add(&s->sent, ctx->bytes_acked);
	__sync_fetch_and_add(&s->received, ctx->bytes_received);
	observe(&s->rtt, ctx->srtt_us >> 3);
}

#endif
