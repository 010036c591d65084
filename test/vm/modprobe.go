// SPDX-License-Identifier: Apache-2.0

//go:build linux

package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// modprobe loads modules as the command of that name does.
func modprobe(args []string) error {
	text, err := os.ReadFile(indexFile)
	if err != nil {
		return err
	}
	var x index
	if err := json.Unmarshal(text, &x); err != nil {
		return fmt.Errorf("read %s: %w", indexFile, err)
	}
	for _, name := range args {
		if strings.HasPrefix(name, "-") {
			continue
		}
		order, err := x.resolve(name)
		if err != nil {
			return err
		}
		for _, m := range order {
			if err := m.load(); err != nil {
				return fmt.Errorf("load %s: %w", m.Name, err)
			}
		}
	}
	return nil
}

func (m module) load() error {
	f, err := os.Open(m.File)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}
