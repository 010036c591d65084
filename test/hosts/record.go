// SPDX-License-Identifier: Apache-2.0

package hosts

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Result is how a profile was played on a kernel.
type Result struct {
	// Kept are as many of the Cells as were as they should be.
	Kept, Cells int
	// Outside is who served the clients outside.
	Outside Servers
	// Digest is that of the profile as it was played.
	Digest string
}

// Servers are programs, rules or both.
type Servers string

// Servers of clients outside.
const (
	ByPrograms Servers = "programs"
	ByRules    Servers = "rules"
	ByBoth     Servers = "programs+rules"
)

// Record are the results of one kernel, by the name of the profile. Its file has a line for each:
//
//	routed 212/212 programs 1f0b9c2d
type Record map[string]Result

// ReadRecord reads a file. One that does not exist has no results.
func ReadRecord(path string) (Record, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return Record{}, nil
	}
	if err != nil {
		return nil, err
	}
	r := Record{}
	for line := range strings.Lines(string(text)) {
		var name string
		var result Result
		if _, err := fmt.Sscanf(line, "%s %d/%d %s %s\n", &name, &result.Kept, &result.Cells, &result.Outside, &result.Digest); err != nil {
			return nil, fmt.Errorf("%s: line %q: %w", path, line, err)
		}
		r[name] = result
	}
	return r, nil
}

// Write writes a file.
func (r Record) Write(path string) error {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(r)) {
		result := r[name]
		fmt.Fprintf(&b, "%s %d/%d %s %s\n", name, result.Kept, result.Cells, result.Outside, result.Digest)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(b.String()), 0o644)
}

// KernelRecords are the records of all kernels, by version: 6.12.
type KernelRecords map[string]Record

// ReadRecords reads the files of a directory, which are named like 6.12.txt.
func ReadRecords(directory string) (KernelRecords, error) {
	files, err := filepath.Glob(filepath.Join(directory, "*.txt"))
	if err != nil {
		return nil, err
	}
	all := KernelRecords{}
	for _, file := range files {
		if all[strings.TrimSuffix(filepath.Base(file), ".txt")], err = ReadRecord(file); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// versions are those of the kernels, the oldest first.
func (k KernelRecords) versions() []string {
	number := func(version string) int {
		major, minor, _ := strings.Cut(version, ".")
		a, _ := strconv.Atoi(major)
		b, _ := strconv.Atoi(minor)
		return a<<16 | b
	}
	return slices.SortedFunc(maps.Keys(k), func(a, b string) int { return number(a) - number(b) })
}

// digest changes with what a profile sets up and plays.
func (p *Profile) digest() string {
	played := *p
	played.Name, played.Like, played.Short, played.Daemons = "", "", false, nil // a function has no text
	sum := sha256.Sum256(fmt.Appendf(nil, "%+v %v", played, p.Cells()))
	return hex.EncodeToString(sum[:4])
}

// text is the result of a profile for readers. A result of the profile as it was before a change does
// not count.
func (r Record) text(p *Profile) string {
	result, ok := r[p.Name]
	if !ok || result.Digest != p.digest() {
		return "not run"
	}
	text := "all"
	if result.Kept < result.Cells {
		text = strconv.Itoa(result.Kept)
	}
	switch result.Outside {
	case ByRules:
		text += ", rules"
	case ByBoth:
		text += ", partly rules"
	}
	return text
}
