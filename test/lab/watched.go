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

// Watched is a command that a test watches: what it prints is kept.
type Watched struct {
	*Cmd
	Log *Log
}

// Watch keeps what a command prints once it runs.
func Watch(c *Cmd) *Watched {
	p := &Watched{Cmd: c, Log: &Log{}}
	p.Stdout, p.Stderr = p.Log, p.Log
	return p
}

// Begin has the process run up to the end of the test. If that fails, it shows the log.
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

// Terminate asks the process to end, as kubelet does, and expects that it does so in order.
func (p *Watched) Terminate(tb TB) {
	tb.Helper()
	if err := p.Process.Signal(syscall.SIGTERM); err != nil {
		tb.Fatalf("end the process on %s: %v", p.sandbox.Name, err)
	}
	if err := p.Wait(); err != nil {
		tb.Fatalf("the process on %s after SIGTERM: %v", p.sandbox.Name, err)
	}
}

// Says is the condition that the log has a text.
func (p *Watched) Says(text string) func() error {
	return func() error {
		if !strings.Contains(p.Log.String(), text) {
			return fmt.Errorf("the log does not say %q", text)
		}
		return nil
	}
}

// Ended says whether the process waits for nothing but being waited for.
func (p *Watched) Ended() bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid))
	_, state, _ := bytes.Cut(stat, []byte(") ")) // after the name, which may hold anything
	return err != nil || bytes.HasPrefix(state, []byte("Z"))
}

// errEnded is that of a process that cannot do what is awaited any more.
var errEnded = errors.New("the process has ended")

// Await is the function of that name while the process lives.
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

// awaitInterval is short, as most of what is awaited is there within milliseconds.
const awaitInterval = 5 * time.Millisecond

// Await asks again and again until a condition holds. A test where that takes longer than
// the limit ends, and says why it does not hold.
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

// Memory is what the kernel says of the process's in a field of /proc/PID/status, in MiB.
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
