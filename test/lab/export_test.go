// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import "time"

// SetDialTimeout is for dials whose context has no deadline; call restore in the end.
func SetDialTimeout(d time.Duration) (restore func()) {
	was := dialTimeout
	dialTimeout = d
	return func() { dialTimeout = was }
}
