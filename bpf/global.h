/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_GLOBAL_H
#define TANDEM_GLOBAL_H

/*
 * A global function: the verifier checks it once, whoever calls it, and not
 * once for every path that leads to it. It must not be static, and it has to
 * check its pointers for NULL.
 */
#define GLOBAL __attribute__((noinline))

#endif
