// SPDX-License-Identifier: Apache-2.0

// Package configmap updates directories as the kubelet updates volumes of ConfigMaps: the
// files that a container sees are links through a link, which is switched.
package configmap

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// current is the link that is switched.
const current = "..data"

// Update makes the files in a directory these, step by step as the kubelet's writer does.
// A file that is to change is itself never touched: its link stays, and leads elsewhere.
func Update(dir string, files map[string]string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("update the volume %s: %w", dir, err)
		}
	}()
	old, err := os.Readlink(filepath.Join(dir, current))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	data, err := os.MkdirTemp(dir, time.Now().UTC().Format("..2006_01_02_15_04_05."))
	if err == nil {
		err = os.Chmod(data, 0o755)
	}
	if err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(data, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	temp := filepath.Join(dir, current+"_tmp")
	if err := os.Symlink(filepath.Base(data), temp); err != nil {
		return err
	}
	if err := os.Rename(temp, filepath.Join(dir, current)); err != nil {
		return err
	}
	for name := range files {
		if err := os.Symlink(filepath.Join(current, name), filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	if old == "" {
		return nil
	}
	gone, err := os.ReadDir(filepath.Join(dir, old))
	if err != nil {
		return err
	}
	for _, file := range gone {
		if _, stays := files[file.Name()]; stays {
			continue
		}
		if err := os.Remove(filepath.Join(dir, file.Name())); err != nil {
			return err
		}
	}
	return os.RemoveAll(filepath.Join(dir, old))
}
