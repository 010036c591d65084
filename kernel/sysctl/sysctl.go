// SPDX-License-Identifier: Apache-2.0

// Package sysctl changes settings of the kernel that are files of /proc/sys and /sys.
package sysctl

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Root is the directory that has proc and sys: "/", or one of a test. Settings of a
// network namespace are those of the calling thread's.
type Root string

// Get is the value of a setting, named by its path below the root.
func (r Root) Get(name string) (string, error) {
	b, err := os.ReadFile(filepath.Join(string(r), name))
	return strings.TrimSpace(string(b)), err
}

// Ensure gives a setting a value, and says whether it had another one. What has the
// value already can be read-only.
func (r Root) Ensure(name, value string) (changed bool, err error) {
	is, err := r.Get(name)
	if err != nil {
		return false, fmt.Errorf("read a setting of the kernel: %w", err)
	}
	if is == value {
		return false, nil
	}
	// Never made: what is not there is not a setting of this kernel.
	f, err := os.OpenFile(filepath.Join(string(r), name), os.O_WRONLY|os.O_TRUNC, 0)
	if err == nil {
		_, err = f.WriteString(value)
		if closed := f.Close(); err == nil {
			err = closed
		}
	}
	if err != nil {
		return false, fmt.Errorf("change a setting of the kernel from %s to %s: %w", is, value, err)
	}
	return true, nil
}

// Foreign says that nobody may write a setting, whatever its privileges: it is that of
// another network namespace, which is shown here.
func (r Root) Foreign(name string) bool {
	info, err := os.Stat(filepath.Join(string(r), name))
	return err == nil && info.Mode().Perm()&0o222 == 0
}
