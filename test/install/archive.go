// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"
)

// layer is one of an image: an archive in a file.
type layer struct {
	path   string
	size   int64
	digest string
}

// newLayer writes a layer of files and directories of this machine, by their names in the image.
func newLayer(file string, content map[string]string) (l layer, err error) {
	f, err := os.Create(file)
	if err != nil {
		return l, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	sum := sha256.New()
	w := tar.NewWriter(io.MultiWriter(f, sum))
	for to, from := range content {
		if err := add(w, to, from); err != nil {
			return l, fmt.Errorf("add %s to an image: %w", from, err)
		}
	}
	if err := w.Close(); err != nil {
		return l, err
	}
	info, err := f.Stat()
	if err != nil {
		return l, err
	}
	return layer{file, info.Size(), fmt.Sprintf("sha256:%x", sum.Sum(nil))}, nil
}

func add(w *tar.Writer, to, from string) error {
	return filepath.WalkDir(from, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		link := ""
		if info.Mode()&fs.ModeSymlink != 0 {
			if link, err = os.Readlink(p); err != nil {
				return err
			}
		}
		h, err := tar.FileInfoHeader(info, link)
		if err != nil {
			return err
		}
		h.Name = strings.TrimPrefix(path.Join(to, strings.TrimPrefix(p, from)), "/")
		if h.Name == "" {
			return nil // the root
		}
		if err := w.WriteHeader(h); err != nil || !info.Mode().IsRegular() {
			return err
		}
		f, err := os.Open(p)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.Copy(w, f)
		return err
	})
}

// image is what docker build would make.
type image struct {
	Name       string
	Entrypoint []string
	Layers     []layer // the lowest first
}

// save writes images as docker save does: a layer that several have is written once.
func save(out io.Writer, images ...image) error {
	w := tar.NewWriter(out)
	type entry struct {
		Config           string
		RepoTags, Layers []string
	}
	var manifest []entry
	written := map[string]bool{}
	for i, im := range images {
		e := entry{Config: fmt.Sprintf("%d.json", i), RepoTags: []string{im.Name}}
		var digests []string
		for _, l := range im.Layers {
			name := strings.TrimPrefix(l.digest, "sha256:") + ".tar"
			e.Layers, digests = append(e.Layers, name), append(digests, l.digest)
			if written[name] {
				continue
			}
			written[name] = true
			if err := addLayer(w, name, l); err != nil {
				return err
			}
		}
		config := map[string]any{
			"architecture": runtime.GOARCH, "os": "linux", "rootfs": map[string]any{"type": "layers", "diff_ids": digests},
			"config": map[string]any{"Entrypoint": im.Entrypoint, "Env": []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}},
		}
		if err := addJSON(w, e.Config, config); err != nil {
			return err
		}
		manifest = append(manifest, e)
	}
	return errors.Join(addJSON(w, "manifest.json", manifest), w.Close())
}

func addLayer(w *tar.Writer, name string, l layer) error {
	f, err := os.Open(l.path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: l.size}); err != nil {
		return err
	}
	_, err = io.Copy(w, f)
	return err
}

func addJSON(w *tar.Writer, name string, content any) error {
	text, err := json.Marshal(content)
	if err != nil {
		return err
	}
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(text))}); err != nil {
		return err
	}
	_, err = w.Write(text)
	return err
}
