// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netns

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func TestCookieOfErrors(t *testing.T) {
	if _, err := CookieOf("/proc/self/nothing"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing path: %v", err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := CookieOf(file); err == nil {
		t.Error("an ordinary file has a cookie")
	}
}
