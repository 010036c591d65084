// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netns

import (
	"errors"
	"fmt"
)

// CookieOf returns the cookie of the network namespace at a path, such as /proc/1234/ns/net.
// It needs CAP_SYS_ADMIN, and Linux 5.14.
func CookieOf(path string) (uint64, error) {
	ns, err := Open(path)
	if err != nil {
		return 0, err
	}
	defer ns.Close()
	cookie, err := ns.Cookie()
	if err != nil {
		return 0, err
	}
	if cookie == 0 {
		return 0, fmt.Errorf("read the cookie of %s: %w before Linux 5.14", path, errors.ErrUnsupported)
	}
	return cookie, nil
}
