// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Watched is a command whose output is kept.
type Watched struct {
	*Cmd
	Log *Log
}

// Watch makes a command keep its output.
func Watch(c *Cmd) *Watched {
	p := &Watched{Cmd: c, Log: &Log{}}
	p.Stdout, p.Stderr = p.Log, p.Log
	return p
}

// Begin starts the process, which ends with the test. If the test fails, its log is printed.
func (p *Watched) Begin(tb TB) {
	tb.Helper()
	if err := p.Start(); err != nil {
		tb.Fatalf("start a process on %s: %v", p.sandbox.Name, err)
	}
	tb.Cleanup(func() {
		_ = p.Close()
		if tb.Failed() {
			tb.Logf("log of the process on %s:\n%s", p.sandbox.Name, p.Log)
		}
	})
}

// Terminate sends SIGTERM, as kubelet does, and expects that the process exits with status 0.
func (p *Watched) Terminate(tb TB) {
	tb.Helper()
	if err := p.Process.Signal(syscall.SIGTERM); err != nil {
		tb.Fatalf("end the process on %s: %v", p.sandbox.Name, err)
	}
	if err := p.Wait(); err != nil {
		tb.Fatalf("the process on %s after SIGTERM: %v", p.sandbox.Name, err)
	}
}

// Says is the condition that the log contains a text.
func (p *Watched) Says(text string) func() error {
	return func() error {
		if !strings.Contains(p.Log.String(), text) {
			return fmt.Errorf("the log does not say %q", text)
		}
		return nil
	}
}

// Ended reports whether the process has exited, even if nothing has waited for it yet.
func (p *Watched) Ended() bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid))
	_, state, _ := bytes.Cut(stat, []byte(") ")) // after the name, which may hold anything
	return err != nil || bytes.HasPrefix(state, []byte("Z"))
}

// errEnded ends Await early: the process cannot fulfil a condition any more.
var errEnded = errors.New("the process has ended")

// Await is the function Await, but fails at once when the process has ended.
func (p *Watched) Await(tb TB, limit time.Duration, what string, condition func() error) {
	tb.Helper()
	Await(tb, limit, what, func() error {
		ended := p.Ended()
		err := condition()
		if err != nil && ended {
			return fmt.Errorf("%w: %w", err, errEnded)
		}
		return err
	})
}

// awaitInterval is short, as most conditions are met within milliseconds.
const awaitInterval = 5 * time.Millisecond

// Await polls until a condition holds. After the limit, it fails the test with the last
// error.
func Await(tb TB, limit time.Duration, what string, condition func() error) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), limit)
	defer cancel()
	tick := time.NewTicker(awaitInterval)
	defer tick.Stop()
	for {
		over := ctx.Err() != nil
		err := condition()
		if err == nil {
			return
		}
		if over || errors.Is(err, errEnded) {
			tb.Fatalf("%s: %v", what, err)
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

// Memory returns a field of /proc/PID/status about memory, in MiB.
func (p *Watched) Memory(tb TB, field string) float64 {
	tb.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Process.Pid))
	if err != nil {
		tb.Fatalf("%v", err)
	}
	for line := range strings.Lines(string(text)) {
		if name, value, _ := strings.Cut(line, ":"); name == field {
			kib, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
			if err != nil {
				tb.Fatalf("%s of a process on %s: %v", field, p.sandbox.Name, err)
			}
			return kib / 1024
		}
	}
	tb.Fatalf("a process on %s has no %s", p.sandbox.Name, field)
	return 0
}
