// SPDX-License-Identifier: Apache-2.0

//go:build linux

package vm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Options are the command and the machine to run it in.
type Options struct {
	Kernel Kernel
	// Init is a static binary whose main calls Main.
	Init string
	// Args are the command. A path is copied into the guest; a name without a slash is
	// one of the guest's programs.
	Args []string
	// Dir is its working directory. The guest has the surrounding Go module at the same path,
	// as tests read files of their packages.
	Dir string
	// Env are additional environment variables.
	Env []string
	// Files are additional files, and directories with their contents, to copy, at the same paths.
	Files []string
	// Output is where standard output and error go.
	Output io.Writer
	// Memory of the machine in MiB, half of which files may fill; 1024 if zero.
	Memory int
	// CPUs is their number; one if zero, as more do not make it faster.
	CPUs int
	// Timeout is when it is killed. The default is a minute after the timeout of a test
	// binary, or ten minutes for other commands.
	Timeout time.Duration
}

// Result is the result of a command.
type Result struct {
	// Code is its exit code.
	Code int
	// Release is the release of the kernel.
	Release string
	// Boot and Run are how long the kernel and the command took.
	Boot, Run time.Duration
}

// Available returns nil if machines can be run here, or what is missing.
func Available() error {
	if _, err := exec.LookPath(qemu); err != nil {
		return fmt.Errorf("%w; on Debian: apt-get install qemu-system-x86", err)
	}
	return nil
}

const qemu = "qemu-system-x86_64"

// Run boots a machine, runs a command in it, and returns when both have ended. An error
// means that the command's result is unknown.
func (c *Cache) Run(ctx context.Context, o Options) (_ *Result, err error) {
	if err := Available(); err != nil {
		return nil, err
	}
	p, err := c.parts(ctx, o.Kernel, false)
	if err != nil {
		return nil, err
	}
	dir, done, err := c.scratch()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, done()) }()

	j := job{Args: o.Args, Dir: o.Dir, Env: o.Env, Outputs: outputs(o.Args, o.Dir), Now: time.Now()}
	initrd := filepath.Join(dir, "initrd")
	if err := writeInitrd(initrd, p, o, j); err != nil {
		return nil, fmt.Errorf("write initramfs: %w", err)
	}
	if o.Timeout == 0 {
		o.Timeout = 10 * time.Minute
		if t := testTimeout(o.Args); t > 0 {
			o.Timeout = t + time.Minute
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, o.Timeout, fmt.Errorf("it did not end within %s", o.Timeout))
	defer cancel()

	consoleFile, resultFile := filepath.Join(dir, "console"), filepath.Join(dir, "result")
	said, err := o.emulate(ctx, p.vmlinuz, initrd, consoleFile, resultFile)
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	// Ignore QEMU's exit status: it is 0 even if the guest panics.
	var e *end
	if err == nil {
		e, err = readResult(resultFile, j.Outputs)
	}
	if err != nil {
		return nil, fmt.Errorf("the machine with Linux %s failed: %w\n%s%s", p.release, err, said, tail(consoleFile))
	}
	return &Result{Code: e.Code, Release: e.Release, Boot: e.Boot, Run: e.Run}, nil
}

// scratch makes a directory for a machine, and removes those of killed processes, since an
// initramfs is large. A running process holds a lock on its directory.
func (c *Cache) scratch() (dir string, done func() error, err error) {
	all, err := os.OpenFile(filepath.Join(c.dir, "machines.lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", nil, err
	}
	defer all.Close()
	if err := unix.Flock(int(all.Fd()), unix.LOCK_EX); err != nil {
		return "", nil, fmt.Errorf("lock %s: %w", all.Name(), err)
	}
	const name = "tandem-machine-"
	old, err := filepath.Glob(filepath.Join(os.TempDir(), name+"*"))
	if err != nil {
		return "", nil, err
	}
	for _, dir := range old {
		// Directories of other users cannot be opened or removed; ignore them.
		if held, err := lockDir(dir); err == nil {
			_ = os.RemoveAll(dir)
			_ = held.Close()
		}
	}
	if dir, err = os.MkdirTemp("", name); err != nil {
		return "", nil, err
	}
	held, err := lockDir(dir)
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	return dir, func() error { return errors.Join(os.RemoveAll(dir), held.Close()) }, nil
}

func lockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// emulate runs QEMU.
func (o Options) emulate(ctx context.Context, vmlinuz, initrd, consoleFile, resultFile string) (said string, err error) {
	cpus := max(o.CPUs, 1)
	memory := o.Memory
	if memory == 0 {
		memory = 1024
	}
	cmd := exec.CommandContext(ctx, qemu,
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		// No KVM: inside a virtual machine it often exists, but does not work. One thread:
		// with several, QEMU 7 executes code while the kernel is patching it.
		"-accel", "tcg,thread=single", "-cpu", o.Kernel.CPU, "-smp", strconv.Itoa(cpus), "-m", strconv.Itoa(memory),
		"-kernel", vmlinuz, "-initrd", initrd,
		// Without norandmaps QEMU translates each program anew.
		"-append", "console="+console+" panic=-1 oops=panic quiet nokaslr norandmaps mitigations=off random.trust_cpu=on",
		"-serial", "file:"+consoleFile, "-serial", "stdio", "-serial", "file:"+resultFile)
	var errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = o.Output, &errs
	cmd.WaitDelay = 5 * time.Second
	// If this process is killed, QEMU must end too. The kernel sends that signal when
	// the thread that forked ends, so it is locked until then.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err = cmd.Run()
	return errs.String(), err
}

// writeInitrd joins the cached archives and the job.
func writeInitrd(name string, p parts, o Options, j job) (err error) {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for _, part := range []string{p.userland, p.modules} {
		if err := appendFile(f, part); err != nil {
			return err
		}
	}
	a := newArchive(f)
	if err := a.copy("init", o.Init); err != nil {
		return err
	}
	text, err := json.Marshal(j)
	if err != nil {
		return err
	}
	if err := a.text(jobFile, string(text)); err != nil {
		return err
	}
	for _, file := range o.Files {
		if err := a.add(file); err != nil {
			return err
		}
	}
	if strings.Contains(o.Args[0], "/") {
		program := absolute(o.Args[0], o.Dir)
		if err := a.copy(merged(program), program); err != nil {
			return err
		}
	}
	for _, name := range j.Outputs {
		if info, err := os.Stat(name); err != nil || !info.IsDir() {
			name = path.Dir(name)
		}
		if err := a.dir(merged(name), 0o755); err != nil {
			return err
		}
	}
	if module := moduleRoot(o.Dir); module != "" {
		if err := a.tree(module, notSource); err != nil {
			return err
		}
	}
	if err := a.dir(o.Dir, 0o755); err != nil {
		return err
	}
	return a.close()
}

// notSource reports whether no test reads a path of the Go module.
func notSource(rel string) bool {
	switch rel {
	case ".git", ".cache", "bin":
		return true
	}
	return strings.HasSuffix(rel, ".test")
}

// moduleRoot returns the closest directory above dir with a go.mod, if there is one.
func moduleRoot(dir string) string {
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		if dir == "/" {
			return ""
		}
	}
}

func appendFile(w io.Writer, name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(w, f)
	return err
}

func readResult(name string, wanted []string) (*end, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return receive(f, wanted)
}

// tail returns the last lines of the kernel's log.
func tail(name string) string {
	const lines = 60
	data, _ := os.ReadFile(name)
	all := strings.SplitAfter(string(data), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "")
}
