// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Layer is one of an image: an archive in a file.
type Layer struct {
	path         string
	descriptor   descriptor
	uncompressed string // digest
}

// NewLayer writes a layer of files and directories of this machine, by their names in the image. In the image, root owns them, and they were
// written at one time: owners and times of this machine are not in it.
func NewLayer(file string, content map[string]string, written time.Time, compress bool) (l Layer, err error) {
	f, err := os.Create(file)
	if err != nil {
		return l, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	stored, plain := sha256.New(), sha256.New()
	buffered := bufio.NewWriterSize(io.MultiWriter(f, stored), 1<<20)
	l.path, l.descriptor.MediaType = file, mediaLayer
	to := io.Writer(buffered)
	var zip *gzip.Writer
	if compress {
		zip = gzip.NewWriter(buffered)
		to, l.descriptor.MediaType = zip, mediaLayer+"+gzip"
	}
	w := tar.NewWriter(io.MultiWriter(to, plain))
	for _, name := range slices.Sorted(maps.Keys(content)) {
		if err := add(w, name, content[name], written); err != nil {
			return l, fmt.Errorf("add %s to an image: %w", content[name], err)
		}
	}
	if err := w.Close(); err != nil {
		return l, err
	}
	if zip != nil {
		if err := zip.Close(); err != nil {
			return l, err
		}
	}
	if err := buffered.Flush(); err != nil {
		return l, err
	}
	info, err := f.Stat()
	if err != nil {
		return l, err
	}
	l.descriptor.Size, l.descriptor.Digest = info.Size(), fmt.Sprintf("sha256:%x", stored.Sum(nil))
	l.uncompressed = fmt.Sprintf("sha256:%x", plain.Sum(nil))
	return l, nil
}

// add adds a file, or a directory in the order of names.
func add(w *tar.Writer, to, from string, written time.Time) error {
	return filepath.WalkDir(from, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		link := ""
		if info.Mode()&fs.ModeSymlink != 0 {
			if link, err = os.Readlink(file); err != nil {
				return err
			}
		}
		full, err := tar.FileInfoHeader(info, link)
		if err != nil {
			return err
		}
		h := &tar.Header{Typeflag: full.Typeflag, Name: strings.TrimPrefix(path.Join(to, strings.TrimPrefix(file, from)), "/"), Linkname: full.Linkname, Size: full.Size, Mode: modeOf(info), ModTime: written}
		if h.Name == "" {
			return nil // the root
		}
		if info.IsDir() {
			h.Name += "/"
		}
		if err := w.WriteHeader(h); err != nil || !info.Mode().IsRegular() {
			return err
		}
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.Copy(w, f)
		return err
	})
}

// modeOf are permissions that do not depend on the umask of the machine.
func modeOf(info fs.FileInfo) int64 {
	switch m := info.Mode(); {
	case m&fs.ModeSymlink != 0, m.IsDir() && m&fs.ModeSticky == 0, m.Perm()&0o100 != 0 && m.IsRegular():
		return 0o755
	case m.IsDir():
		return 0o1777
	}
	return 0o644
}
