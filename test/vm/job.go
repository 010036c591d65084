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
	endEntry   = "end" // last entry of the result
	console    = "ttyS0"
	outputLine = "/dev/ttyS1"
	resultLine = "/dev/ttyS2"
)

// job describes what the guest runs.
type job struct {
	Args []string
	Dir  string
	Env  []string
	// Outputs are files, and directories with their contents, that the guest sends back.
	Outputs []string
	Now     time.Time
}

// end is the result of a job. If it is missing, the guest died.
type end struct {
	Code int
	// Release of the kernel, as uname -r.
	Release   string
	Boot, Run time.Duration
}

// outputs returns the files that a test binary must write, as absolute paths: those of go test, and
// of the flag -record of test/hosts.
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
		case name == "-test.gocoverdir", name == "-record":
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

// testTimeout returns the timeout of a test binary; zero for none.
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

// receive writes the files that the guest sent, and only requested ones.
func receive(r io.Reader, wanted []string) (*end, error) {
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if err != nil {
			return nil, fmt.Errorf("read results of the guest: %w", err)
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

// send sends the requested files that exist, and the end.
func send(w io.Writer, wanted []string, e end) error {
	out := tar.NewWriter(w)
	for _, root := range wanted {
		err := filepath.WalkDir(root, func(name string, d os.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return nil // the job did not write it
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
