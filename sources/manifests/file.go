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

// maxFile bounds what is read at once. A hundred thousand objects fit.
const maxFile = 256 << 20

// isManifest tells the names that are read: editors' and ConfigMap volumes'
// own files begin with a dot or a hash, or end otherwise.
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

// fingerprint tells whether a file may have changed since it was read.
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

// errMoving says that a file changed while it was read.
var errMoving = errors.New("file changes while it is read")

// readFile reads a regular file, following links. A directory counts as
// absent: the source does not descend.
func readFile(path string) ([]byte, fingerprint, error) {
	// Without O_NONBLOCK the open of a pipe waits for its writer.
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
		return nil, fingerprint{}, fmt.Errorf("file of %d bytes, at most %d are read; split it", info.Size(), maxFile)
	}
	before := fingerprintOf(info)
	data := make([]byte, info.Size())
	if _, err := io.ReadFull(f, data); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
			return nil, fingerprint{}, errMoving // cut short meanwhile
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

// file is what is known of one manifest.
type file struct {
	name string
	// print is of the last read; dirty asks for a read whatever print says.
	print fingerprint
	dirty bool
	// missing files had been there before.
	missing bool
	// failure is why the last read came to nothing.
	failure string
	// read is set once content and all below tell of a read.
	read    bool
	content digest
	// documents by their text: what is in here need not be decoded again.
	documents map[digest][]key
	// holds has the line of every object the file claims, owns those of them
	// (and, until they are deleted, those it no longer claims) that were
	// delivered from it, contested those another file owns, and which.
	holds     map[key]int
	owns      map[key]struct{}
	contested map[key]*file
	// taken are the objects to decode from it whether known or not: their
	// previous owner is gone.
	taken map[key]struct{}
	// unknown means that a part of it cannot be read, so nothing it owns may
	// be deleted.
	unknown  bool
	problems []finding
	// settles is when its problems are reported and its deletes delivered,
	// unless it changes before; zero when that has been done.
	settles  time.Time
	reported map[string]struct{}
}

// leaving are the objects it owns and no longer claims.
func (f *file) leaving() []key {
	var gone []key
	for k := range f.owns {
		if _, ok := f.holds[k]; !ok {
			gone = append(gone, k)
		}
	}
	return gone
}
