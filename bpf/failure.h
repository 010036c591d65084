/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#ifndef TANDEM_FAILURE_H
#define TANDEM_FAILURE_H

#include "flow_types.h"
#include "global.h"
#include "packet_failed.h"
#include "reasons.h"

/* Counts a failure, and shows it to tandemctl monitor. */
GLOBAL int count_failure(const struct flow_key *key, __u32 reason)
{
	if (!key)
		return 0;
	count_reason(reason);
	return packet_failed(key, reason);
}

#endif
