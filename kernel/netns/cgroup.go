// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// InCgroups returns the cookies of the network namespaces that processes in some cgroups have, by a key
// of the cgroup; the caller's namespace is left out. keyOf gets the path of a cgroup in its hierarchy,
// as in /proc/<pid>/cgroup, and returns its key, or an empty one for cgroups that are not asked for.
//
// Processes are those under procRoot (usually /proc). Those that end meanwhile are no error. Processes whose
// namespace cannot be read are skipped, and the last of these errors is returned together with what was
// found. It needs CAP_SYS_PTRACE, CAP_SYS_ADMIN and Linux 5.14.
func InCgroups(procRoot string, keyOf func(path string) string) (map[string][]uint64, error) {
	own, err := os.Readlink(ofThread)
	if err != nil {
		return nil, fmt.Errorf("read own network namespace: %w", err)
	}
	processes, err := os.ReadDir(procRoot)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	found, cookies := map[string][]uint64{}, map[string]uint64{} // cookies by link
	skipped, last := 0, error(nil)
	for _, p := range processes {
		if _, err := strconv.ParseUint(p.Name(), 10, 32); err != nil {
			continue
		}
		key, cookie, err := inCgroup(filepath.Join(procRoot, p.Name()), own, keyOf, cookies)
		switch {
		case errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH):
		case err != nil:
			skipped, last = skipped+1, err
		case key != "" && !slices.Contains(found[key], cookie):
			found[key] = append(found[key], cookie)
		}
	}
	if last != nil {
		last = fmt.Errorf("network namespaces of %d processes cannot be read, last: %w", skipped, last)
	}
	return found, last
}

// inCgroup returns the key of a process' cgroup and the cookie of its network namespace, or no key if
// the process is of no interest.
func inCgroup(process, own string, keyOf func(string) string, cookies map[string]uint64) (key string, cookie uint64, err error) {
	path := filepath.Join(process, "ns", "net")
	link, err := os.Readlink(path)
	if err != nil || link == own {
		return "", 0, err
	}
	text, err := os.ReadFile(filepath.Join(process, "cgroup"))
	if err != nil {
		return "", 0, err
	}
	for line := range strings.Lines(string(text)) { // hierarchy:controllers:path
		if parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3); len(parts) == 3 {
			if key = keyOf(parts[2]); key != "" {
				break
			}
		}
	}
	if key == "" {
		return "", 0, nil
	}
	cookie, known := cookies[link]
	if !known {
		if cookie, err = CookieOf(path); err != nil {
			return "", 0, err
		}
		cookies[link] = cookie
	}
	return key, cookie, nil
}
