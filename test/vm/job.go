// SPDX-License-Identifier: Apache-2.0

//go:build linux

package vm

import (
	"archive/tar"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Names that host and guest share.
const (
	jobFile    = "/job.json"
	endEntry   = "end" // of what comes back
	console    = "ttyS0"
	outputLine = "/dev/ttyS1"
	resultLine = "/dev/ttyS2"
)

// job describes what the guest runs.
type job struct {
	Args []string
	Dir  string
	Env  []string
	// Outputs are files, and directories with all below, that come back.
	Outputs []string
	Now     time.Time
}

// end is the result of a job. If there is none, the guest died.
type end struct {
	Code int
	// Release of the kernel, as uname -r.
	Release   string
	Boot, Run time.Duration
}

// outputs are the files that a test binary is asked to write, as absolute paths.
func outputs(args []string, dir string) []string {
	var list []string
	below := dir
	for _, a := range args {
		if v, ok := strings.CutPrefix(a, "-test.outputdir="); ok {
			below = absolute(v, dir)
			list = append(list, below)
		}
	}
	for _, a := range args {
		name, value, _ := strings.Cut(a, "=")
		if value == "" {
			continue
		}
		switch {
		case name == "-test.gocoverdir":
			list = append(list, absolute(value, dir))
		case name == "-test.testlogfile", name == "-test.trace", strings.HasPrefix(name, "-test.") && strings.HasSuffix(name, "profile"):
			list = append(list, absolute(value, below))
		}
	}
	return list
}

func absolute(name, dir string) string {
	if filepath.IsAbs(name) {
		return filepath.Clean(name)
	}
	return filepath.Join(dir, name)
}

// testTimeout is after how long a test binary ends by itself; zero if it does not.
func testTimeout(args []string) time.Duration {
	for _, a := range args {
		if v, ok := strings.CutPrefix(a, "-test.timeout="); ok {
			if d, err := time.ParseDuration(v); err == nil {
				return d
			}
		}
	}
	return 0
}

// receive writes files that came back, and only those that were asked for.
func receive(r io.Reader, wanted []string) (*end, error) {
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if err != nil {
			return nil, fmt.Errorf("read what came back: %w", err)
		}
		if h.Name == endEntry {
			e := &end{}
			return e, json.NewDecoder(in).Decode(e)
		}
		name := filepath.Clean(h.Name)
		asked := false
		for _, w := range wanted {
			asked = asked || name == w || strings.HasPrefix(name, w+"/")
		}
		if !asked || h.Typeflag != tar.TypeReg {
			return nil, fmt.Errorf("received the file %s, which was not requested", h.Name)
		}
		if err := write(name, in); err != nil {
			return nil, err
		}
	}
}

// send writes the files that are there of those that were asked for, and the end.
func send(w io.Writer, wanted []string, e end) error {
	out := tar.NewWriter(w)
	for _, root := range wanted {
		err := filepath.WalkDir(root, func(name string, d os.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return nil // not written, then
			}
			data, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			return sendFile(out, name, data)
		})
		if err != nil {
			return err
		}
	}
	data, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if err := sendFile(out, endEntry, data); err != nil {
		return err
	}
	return out.Close()
}

func sendFile(out *tar.Writer, name string, data []byte) error {
	h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(data)), Format: tar.FormatPAX}
	if err := out.WriteHeader(h); err != nil {
		return err
	}
	_, err := out.Write(data)
	return err
}
