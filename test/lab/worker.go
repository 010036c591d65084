// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ErrClosed is returned for work handed to a sandbox that was closed.
var ErrClosed = errors.New("lab: sandbox is closed")

// pool runs functions on OS threads that enter prepared. Moving a thread into a namespace
// and a cgroup costs far more than passing a function to an existing thread, and tests do
// it in loops. A pool only grows: commands get a death signal when the thread that forked
// them ends.
type pool struct {
	enter func() error

	mu      sync.Mutex
	idle    []*worker
	closed  bool
	running sync.WaitGroup
}

type worker struct {
	jobs chan func() error
	done chan outcome
}

// outcome tells how a function ended.
type outcome struct {
	err      error
	panicked any
	stack    []byte
	exited   bool // runtime.Goexit, which is what t.FailNow does
}

func (p *pool) do(fn func() error) error {
	w, err := p.take()
	if err != nil {
		return err
	}
	w.jobs <- fn
	out := <-w.done
	switch {
	case out.exited:
		return errors.New("lab: the function called runtime.Goexit; return an error instead of failing the test inside Do")
	case out.panicked != nil:
		// Panic in the caller, whose deferred calls remove the lab.
		p.give(w)
		panic(fmt.Sprintf("%v\n\nin a sandbox thread:\n%s", out.panicked, out.stack))
	}
	p.give(w)
	return out.err
}

func (p *pool) take() (*worker, error) {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, ErrClosed
	}
	if n := len(p.idle); n > 0 {
		w := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.mu.Unlock()
		return w, nil
	}
	p.running.Add(1)
	p.mu.Unlock()

	w := &worker{jobs: make(chan func() error), done: make(chan outcome)}
	ready := make(chan error, 1)
	go p.loop(w, ready)
	if err := <-ready; err != nil {
		return nil, err
	}
	return w, nil
}

func (p *pool) give(w *worker) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		close(w.jobs)
		return
	}
	p.idle = append(p.idle, w)
}

// loop never unlocks its thread: the runtime ends the thread with the goroutine, so
// no other goroutine runs on a thread in another namespace.
func (p *pool) loop(w *worker, ready chan<- error) {
	runtime.LockOSThread()
	if unix.Gettid() == os.Getpid() {
		// The runtime parks the main thread instead of ending it, which would
		// keep namespace and cgroup busy for ever. While it is locked here,
		// the next goroutine gets another one.
		started := make(chan error, 1)
		go p.loop(w, started)
		err := <-started
		runtime.UnlockOSThread()
		ready <- err
		return
	}
	defer p.running.Done()
	if err := p.enter(); err != nil {
		ready <- err
		return
	}
	ready <- nil
	for fn := range w.jobs {
		out := call(w, fn)
		w.done <- out
	}
}

// call runs fn. On Goexit it reports from the deferred function, since nothing
// after that runs.
func call(w *worker, fn func() error) (out outcome) {
	finished := false
	defer func() {
		if finished {
			return
		}
		if r := recover(); r != nil {
			out = outcome{panicked: r, stack: debug.Stack()}
			return
		}
		w.done <- outcome{exited: true}
	}()
	out.err = fn()
	finished = true
	return out
}

// close ends the threads and waits for those that are busy, up to the limit.
func (p *pool) close(limit time.Duration) error {
	p.mu.Lock()
	if !p.closed {
		p.closed = true
		for _, w := range p.idle {
			close(w.jobs)
		}
		p.idle = nil
	}
	p.mu.Unlock()

	ended := make(chan struct{})
	go func() {
		p.running.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return nil
	case <-time.After(limit):
		return fmt.Errorf("a function passed to Do still runs after %v", limit)
	}
}
