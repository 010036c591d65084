/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_BTF_EMIT_H
#define TANDEM_BTF_EMIT_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/*
 * Gets an enum into BTF, which describes a type only if something has it. The
 * Go constants for the enum are generated from there (hack/cenums). So each
 * enum that user space needs is the type of a constant in a section that is not
 * loaded.
 */
#define BTF_EMIT(name)                                                         \
	static const enum name btf_emit_##name SEC(".btf_emit")                \
		__attribute__((used))

/*
 * Gets a structure into BTF in full. Of one that is only pointed to from
 * another structure, Clang writes no more than the name. If an object has two
 * such names, their order depends on addresses in Clang's memory (LLVM's
 * BTFDebug.cpp keeps them in a map of pointers), and so on the length of the
 * checkout's path.
 */
#define BTF_EMIT_STRUCT(name)                                                  \
	static struct name *const btf_emit_##name SEC(".btf_types")            \
		__attribute__((used))

/* What struct __sk_buff points to. */
BTF_EMIT_STRUCT(bpf_sock);
BTF_EMIT_STRUCT(bpf_flow_keys);

#endif
