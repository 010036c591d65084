/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_CONTEXT_H
#define TANDEM_CONTEXT_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

/*
 * The packet as a program gets it: on devices, from the kernel's stack (tc), or
 * from the driver before that (XDP). Code that both have in common uses what is
 * here; TANDEM_XDP says which one it is compiled for.
 */
#ifdef TANDEM_XDP
#define CONTEXT struct xdp_md

/* Multi-buffer packets have more than there is between data and data_end (Linux
 * 5.18). */
const volatile __u8 have_frags = 1;

static __always_inline __u32 packet_len(CONTEXT *ctx)
{
	return have_frags ? bpf_xdp_get_buff_len(ctx) :
			    ctx->data_end - ctx->data;
}

/* Headers that are not in the linear part are left to the stack. */
static __always_inline long load_slowly(CONTEXT *ctx, __u32 offset, void *to,
					__u32 len)
{
	return -1;
}
#else
#define CONTEXT struct __sk_buff

static __always_inline __u32 packet_len(const CONTEXT *ctx)
{
	return ctx->len;
}

static __always_inline long load_slowly(CONTEXT *ctx, __u32 offset, void *to,
					__u32 len)
{
	return bpf_skb_load_bytes(ctx, offset, to, len);
}
#endif

/* Copies a header in words: compilers copy what may not be aligned in bytes.
 * The verifier allows it where the processor does. */
static __always_inline void copy_words(void *to, const void *from,
				       const __u32 len)
{
#pragma unroll
	for (__u32 i = 0; i < len / 4; i++)
		((__u32 *)to)[i] = ((const __u32 *)from)[i];
	if (len % 4)
		((__u16 *)to)[len / 2 - 1] = ((const __u16 *)from)[len / 2 - 1];
}

/* Copies a header of even length, also from the nonlinear part of a packet. */
static __always_inline bool load(CONTEXT *ctx, __u32 offset, void *to,
				 const __u32 len)
{
	void *end = (void *)(long)ctx->data_end;
	void *at = (void *)(long)ctx->data;

	if (offset > 0x3fff)
		return !load_slowly(ctx, offset, to, len);
	/* Bounds the offset for the verifier. */
	asm volatile("%0 &= 0x3fff" : "+r"(offset));
	at += offset;
	if (at + len > end)
		return !load_slowly(ctx, offset, to, len);
	copy_words(to, at, len);
	return true;
}

#endif
