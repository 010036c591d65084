// SPDX-License-Identifier: Apache-2.0

//go:build linux

package vm

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// list reads an archive as the kernel does: name, mode and, of files and links, content.
func list(t *testing.T, data []byte) (entries []string) {
	t.Helper()
	at := 0
	for {
		header := data[at:]
		if !bytes.HasPrefix(header, []byte("070701")) {
			t.Fatalf("no header at %d", at)
		}
		field := func(i int) int {
			v, err := strconv.ParseUint(string(header[6+8*i:14+8*i]), 16, 32)
			if err != nil {
				t.Fatal(err)
			}
			return int(v)
		}
		mode, size, nameSize := field(1), field(6), field(11)
		name := string(header[110 : 110+nameSize-1])
		content := align(110 + nameSize)
		if name == "TRAILER!!!" {
			return entries
		}
		entries = append(entries, strings.TrimSpace(fmt.Sprintf("%s %o %s", name, mode, header[content:content+size])))
		at += align(content + size)
	}
}

func align(n int) int { return (n + 3) &^ 3 }

func TestArchive(t *testing.T) {
	var b bytes.Buffer
	a := newArchive(&b)
	for _, err := range []error{
		a.text("/etc/one/name", "12345"),
		a.text("etc/one/other", ""),
		a.link("bin", "usr/bin"),
		a.dir("tmp", 0o700),
		a.dir("tmp", 0o700),
		a.device("dev/console", 5, 1),
		a.file("tmp/x", 0o755, 2, strings.NewReader("ab")),
		a.close(),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	want := []string{
		"etc 40755", "etc/one 40755", "etc/one/name 100644 12345", "etc/one/other 100644", "bin 120777 usr/bin", "tmp 40700",
		"dev 40755", "dev/console 20600", "tmp/x 100755 ab",
	}
	if d := cmp.Diff(want, list(t, b.Bytes())); d != "" {
		t.Errorf("archive (-want +got):\n%s", d)
	}
	if b.Len()%512 != 0 {
		t.Errorf("no archive can follow after %d bytes", b.Len())
	}
	if err := newArchive(&b).file("short", 0o644, 5, strings.NewReader("1234")); err == nil {
		t.Error("no error for a file that is shorter than its size")
	}
}
