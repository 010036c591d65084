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

#endif
