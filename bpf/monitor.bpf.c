// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Programs that tandemctl monitor attaches to the functions of the other
 * programs where packets and connections fail, and where flows are evicted.
 * They report to user space, and change nothing. No process of the proxy needs
 * them.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#include "flow_types.h"

char __license[] SEC("license") = "Dual BSD/GPL";

/* Something that failed, or was passed or evicted. */
struct failure {
	__u64 time; /* nanoseconds of CLOCK_MONOTONIC */
	/* As on arrival; without a source if it is of a socket. */
	struct flow_key key;
	__u32 code; /* enum reason, or enum select_result of a socket */
	__u32 pid;  /* of the process whose socket it is; 0 for packets */
	char comm[16];
};
/* So that BTF has it. */
struct failure *unused_failure __attribute__((unused));

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 256 * 1024);
} tdm_failures SEC(".maps");

/* Of one CPU. */
struct rate {
	__u64 second;	/* of the newest report */
	__u64 reported; /* in that second */
	__u64 left_out; /* since the start */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct rate);
	__uint(max_entries, 1);
} tdm_failure_rate SEC(".maps");

/* Reports per second and CPU. */
const volatile __u32 rate_limit = 100;

static __always_inline struct failure *begin(void)
{
	__u64 now = bpf_ktime_get_ns();
	__u32 zero = 0;
	struct rate *rate = bpf_map_lookup_elem(&tdm_failure_rate, &zero);
	struct failure *f;

	if (!rate)
		return NULL;
	if (rate->second != now / 1000000000) {
		rate->second = now / 1000000000;
		rate->reported = 0;
	}
	f = rate->reported < rate_limit ?
		    bpf_ringbuf_reserve(&tdm_failures, sizeof(*f), 0) :
		    NULL;
	if (!f) {
		rate->left_out++;
		return NULL;
	}
	rate->reported++;
	__builtin_memset(f, 0, sizeof(*f));
	f->time = now;
	return f;
}

/* An argument of the function. The context has those that are pointers for no
 * program, but a helper reads them (Linux 5.17). */
static __always_inline __u64 argument(void *ctx, __u32 number)
{
	__u64 value = 0;

	bpf_get_func_arg(ctx, number, &value);
	return value;
}

/* int packet_failed(const struct flow_key *key, __u32 reason); */
SEC("fentry/packet_failed")
int tdm_packet_fail(void *ctx)
{
	const void *key = (const void *)argument(ctx, 0);
	struct failure *f = begin();

	if (!f)
		return 0;
	bpf_probe_read_kernel(&f->key, sizeof(f->key), key);
	f->code = argument(ctx, 1);
	bpf_ringbuf_submit(f, 0);
	return 0;
}

/* int connection_failed(const struct peer *to, __u32 proto, __u32 result); a
 * peer is an address and a port. */
SEC("fentry/connection_failed")
int tdm_sock_fail(void *ctx)
{
	const char *to = (const char *)argument(ctx, 0);
	struct failure *f = begin();

	if (!f)
		return 0;
	bpf_probe_read_kernel(f->key.dst, sizeof(f->key.dst), to);
	bpf_probe_read_kernel(&f->key.dport, sizeof(f->key.dport),
			      to + sizeof(f->key.dst));
	f->key.proto = argument(ctx, 1);
	f->code = argument(ctx, 2);
	f->pid = bpf_get_current_pid_tgid() >> 32;
	bpf_get_current_comm(f->comm, sizeof(f->comm));
	bpf_ringbuf_submit(f, 0);
	return 0;
}
