// SPDX-License-Identifier: Apache-2.0

//go:build linux

package vm

import (
	"bufio"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// archive writes an initramfs: a cpio archive in the kernel's "newc" format. Several,
// one after another, are one initramfs.
type archive struct {
	out  *bufio.Writer
	n    int64
	ino  int
	dirs map[string]bool
}

func newArchive(w io.Writer) *archive {
	return &archive{out: bufio.NewWriterSize(w, 1<<20), dirs: map[string]bool{".": true, "/": true}}
}

// entry writes an entry and its parent directories, which the kernel does not create.
func (a *archive) entry(name string, mode uint32, rdev uint64, size int64, data io.Reader) error {
	name = strings.TrimPrefix(path.Clean(name), "/")
	if dir := path.Dir(name); !a.dirs[dir] {
		if err := a.dir(dir, 0o755); err != nil {
			return err
		}
	}
	a.ino++
	nlink := 1
	header := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		a.ino, mode, 0, 0, nlink, 0, size, 0, 0, unix.Major(rdev), unix.Minor(rdev), len(name)+1, 0)
	if err := a.write(header + name + "\x00"); err != nil {
		return err
	}
	if size > 0 {
		n, err := io.Copy(a.out, io.LimitReader(data, size))
		a.n += n
		if err == nil && n < size {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return fmt.Errorf("archive %s: %w", name, err)
		}
	}
	return a.pad(4)
}

func (a *archive) write(text string) error {
	n, err := a.out.WriteString(text)
	a.n += int64(n)
	if err != nil {
		return err
	}
	return a.pad(4)
}

func (a *archive) pad(to int64) error {
	for a.n%to != 0 {
		if err := a.out.WriteByte(0); err != nil {
			return err
		}
		a.n++
	}
	return nil
}

func (a *archive) dir(name string, perm fs.FileMode) error {
	name = strings.TrimPrefix(path.Clean(name), "/")
	if a.dirs[name] {
		return nil
	}
	a.dirs[name] = true
	return a.entry(name, unix.S_IFDIR|uint32(perm), 0, 0, nil)
}

func (a *archive) file(name string, perm fs.FileMode, size int64, data io.Reader) error {
	return a.entry(name, unix.S_IFREG|uint32(perm), 0, size, data)
}

func (a *archive) text(name, text string) error {
	return a.file(name, 0o644, int64(len(text)), strings.NewReader(text))
}

func (a *archive) link(name, target string) error {
	return a.entry(name, unix.S_IFLNK|0o777, 0, int64(len(target)), strings.NewReader(target))
}

func (a *archive) device(name string, major, minor uint32) error {
	return a.entry(name, unix.S_IFCHR|0o600, unix.Mkdev(major, minor), 0, nil)
}

// copy writes a file of this machine.
func (a *archive) copy(name, from string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	return a.file(name, info.Mode().Perm(), info.Size(), f)
}

// tree writes a directory of this machine to the same path, without what skip selects.
func (a *archive) tree(root string, skip func(rel string) bool) error {
	return filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		switch {
		case skip(rel) && d.IsDir():
			return fs.SkipDir
		case skip(rel):
			return nil
		case d.IsDir():
			return a.dir(name, 0o755)
		case d.Type() == fs.ModeSymlink:
			target, err := os.Readlink(name)
			if err != nil {
				return err
			}
			return a.link(name, target)
		case d.Type().IsRegular():
			return a.copy(name, name)
		}
		return nil
	})
}

// add copies a file, or a directory with its contents, to the same path.
func (a *archive) add(name string) error {
	info, err := os.Stat(name)
	switch {
	case err != nil:
		return err
	case info.IsDir():
		return a.tree(name, func(string) bool { return false })
	}
	return a.copy(merged(name), name)
}

// close ends the archive, with padding, so that another one can follow.
func (a *archive) close() error {
	if err := a.entry("TRAILER!!!", 0, 0, 0, nil); err != nil {
		return err
	}
	if err := a.pad(512); err != nil {
		return err
	}
	return a.out.Flush()
}
