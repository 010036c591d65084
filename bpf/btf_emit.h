/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_BTF_EMIT_H
#define TANDEM_BTF_EMIT_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/*
 * BTF describes an enum only if something has its type. Go constants are
 * generated from BTF, so every enum that user space needs is the type of a
 * constant here, in a section that is never loaded.
 */
#define BTF_EMIT(name)                                                         \
	static const enum name btf_emit_##name SEC(".btf_emit")                \
		__attribute__((used))

#endif
