// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// maxFile is the maximum size of a file, enough for a hundred thousand objects.
const maxFile = 256 << 20

// isManifest reports whether a file is read, by its name. Temporary files of editors and of
// ConfigMap volumes begin with a dot or a hash, or have other extensions.
func isManifest(name string) bool {
	if strings.HasPrefix(name, ".") || strings.HasPrefix(name, "#") {
		return false
	}
	switch strings.ToLower(filepath.Ext(name)) {
	case ".yaml", ".yml", ".json":
		return true
	}
	return false
}

// fingerprint shows whether a file may have changed since it was read.
type fingerprint struct {
	size     int64
	modified time.Time
	changed  syscall.Timespec
	device   uint64
	inode    uint64
}

func fingerprintOf(info fs.FileInfo) fingerprint {
	print := fingerprint{size: info.Size(), modified: info.ModTime()}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		print.changed, print.device, print.inode = stat.Ctim, uint64(stat.Dev), stat.Ino
	}
	return print
}

// errMoving means that a file changed while it was read.
var errMoving = errors.New("file changed while it was read")

// readFile reads a regular file, following links. It returns fs.ErrNotExist for a directory,
// since subdirectories are not read.
func readFile(path string) ([]byte, fingerprint, error) {
	// Without O_NONBLOCK, opening a pipe waits for a writer.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fingerprint{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fingerprint{}, err
	}
	switch {
	case info.IsDir():
		return nil, fingerprint{}, fs.ErrNotExist
	case !info.Mode().IsRegular():
		return nil, fingerprint{}, errors.New("not a regular file")
	case info.Size() > maxFile:
		return nil, fingerprint{}, fmt.Errorf("file of %d bytes exceeds the limit of %d; split it", info.Size(), maxFile)
	}
	before := fingerprintOf(info)
	data := make([]byte, info.Size())
	if _, err := io.ReadFull(f, data); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
			return nil, fingerprint{}, errMoving // truncated in the meantime
		}
		return nil, fingerprint{}, err
	}
	if info, err = f.Stat(); err != nil {
		return nil, fingerprint{}, err
	}
	if fingerprintOf(info) != before {
		return nil, fingerprint{}, errMoving
	}
	return data, before, nil
}

// file is the state of one manifest file.
type file struct {
	name string
	// print is the fingerprint of the last read. dirty forces a read.
	print fingerprint
	dirty bool
	// missing means that the file was deleted.
	missing bool
	// failure is the error of the last read.
	failure string
	// read means that content and the fields below are valid.
	read    bool
	content digest
	// documents has the decoded documents by digest. They need not be decoded again.
	documents map[digest][]key
	// holds has the line of every object in the file. owns has the objects that were
	// delivered from this file, including removed ones until they are deleted. contested
	// has the objects in the file that another file owns, and that file.
	holds     map[key]int
	owns      map[key]struct{}
	contested map[key]*file
	// taken has the objects that must be decoded again, since their previous owner
	// dropped them.
	taken map[key]struct{}
	// unknown means that a part of the file cannot be read, so no object of it may be
	// deleted.
	unknown  bool
	problems []finding
	// stableAt is when the problems are reported and the deletes are delivered, unless
	// the file changes first. It is zero after that.
	stableAt time.Time
	reported map[string]struct{}
}

// removed returns the objects that the file owns and no longer contains.
func (f *file) removed() []key {
	var gone []key
	for k := range f.owns {
		if _, ok := f.holds[k]; !ok {
			gone = append(gone, k)
		}
	}
	return gone
}
