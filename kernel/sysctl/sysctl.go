// SPDX-License-Identifier: Apache-2.0

// Package sysctl reads and changes kernel settings in /proc/sys and /sys.
package sysctl

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Root is the directory that contains proc and sys: "/", or a directory of a test.
// Settings of network namespaces refer to that of the calling thread.
type Root string

// Get returns the value of a setting, named by its path below the root.
func (r Root) Get(name string) (string, error) {
	b, err := os.ReadFile(filepath.Join(string(r), name))
	return strings.TrimSpace(string(b)), err
}

// Ensure sets a value and reports whether that changed the setting. A setting that has
// the value already may be read-only.
func (r Root) Ensure(name, value string) (changed bool, err error) {
	is, err := r.Get(name)
	if err != nil {
		return false, fmt.Errorf("read sysctl: %w", err)
	}
	if is == value {
		return false, nil
	}
	// Without O_CREATE: a file that does not exist is not a setting of this kernel.
	f, err := os.OpenFile(filepath.Join(string(r), name), os.O_WRONLY|os.O_TRUNC, 0)
	if err == nil {
		_, err = f.WriteString(value)
		if closed := f.Close(); err == nil {
			err = closed
		}
	}
	if err != nil {
		return false, fmt.Errorf("change sysctl from %s to %s: %w", is, value, err)
	}
	return true, nil
}

// Foreign reports whether a setting belongs to another network namespace: the file shows
// its value, but no process can write it.
func (r Root) Foreign(name string) bool {
	info, err := os.Stat(filepath.Join(string(r), name))
	return err == nil && info.Mode().Perm()&0o222 == 0
}

// Change is a setting that has another value than it is to have.
type Change struct {
	// Setting is named as sysctl(8) does if it is below /proc/sys, and else by its path.
	Setting string `json:"setting"`
	// From is empty if the setting does not exist (yet): it may belong to a module that is not
	// loaded.
	From string `json:"from"`
	To   string `json:"to"`
}

// Compare returns the changes that Ensure would make, and makes none. A setting that cannot be
// read is an error.
func (r Root) Compare(name, value string) (list []Change, err error) {
	is, err := r.Get(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("read sysctl: %w", err)
	case is == value:
		return nil, nil
	}
	setting := "/" + name
	if short, found := strings.CutPrefix(name, "proc/sys/"); found {
		setting = strings.ReplaceAll(short, "/", ".")
	}
	return []Change{{Setting: setting, From: is, To: value}}, nil
}
