// SPDX-License-Identifier: Apache-2.0

//go:build linux

package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Main is the guest's side. If the program is process 1, Main does not return.
func Main() {
	if os.Getpid() != 1 || os.Args[0] != "/init" {
		return
	}
	if err := guest(); err != nil {
		fmt.Fprintf(os.Stderr, "init: %v\n", err)
	}
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	os.Exit(1) // makes the kernel panic
}

// mounts are the mounts that tests and tools expect.
var mounts = []struct{ target, fs, options string }{
	{"/proc", "proc", ""},
	{"/sys", "sysfs", ""},
	{"/dev", "devtmpfs", ""},
	{"/dev/pts", "devpts", "ptmxmode=666"},
	{"/dev/shm", "tmpfs", ""},
	{"/run", "tmpfs", ""},
	{"/sys/fs/cgroup", "cgroup2", ""},
	{"/sys/fs/bpf", "bpf", ""},
	{"/sys/kernel/security", "securityfs", ""},
	{"/sys/kernel/tracing", "tracefs", ""},
	{"/sys/kernel/debug", "debugfs", ""},
}

// guest runs the job, as process 1.
func guest() error {
	if err := prepare(); err != nil {
		return err
	}
	var j job
	text, err := os.ReadFile(jobFile)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, &j); err != nil {
		return fmt.Errorf("read job: %w", err)
	}
	if now := time.Now(); now.Before(j.Now) {
		tv := unix.NsecToTimeval(j.Now.UnixNano())
		if err := unix.Settimeofday(&tv); err != nil {
			return fmt.Errorf("set clock: %w", err)
		}
	}
	var e end
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return err
	}
	e.Release = unix.ByteSliceToString(u.Release[:])
	e.Boot = uptime()

	out, err := openLine(outputLine)
	if err != nil {
		return err
	}
	e.Code, err = j.run(out)
	if err != nil {
		fmt.Fprintf(out, "start %s: %v\n", j.Args[0], err)
		e.Code = 127
	}
	e.Run = uptime() - e.Boot
	result, err := openLine(resultLine)
	if err != nil {
		return err
	}
	if err := send(result, j.Outputs, e); err != nil {
		return fmt.Errorf("send result: %w", err)
	}
	return errors.Join(drain(out), drain(result))
}

func prepare() error {
	if err := enterRoot(); err != nil {
		return err
	}
	for _, m := range mounts {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.fs, m.target, m.fs, 0, m.options); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	if err := unix.Mount("", "/", "", unix.MS_SHARED|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("share mounts: %w", err)
	}
	for _, l := range [][2]string{{"fd", ""}, {"stdin", "0"}, {"stdout", "1"}, {"stderr", "2"}} {
		if err := os.Symlink(strings.TrimSuffix("/proc/self/fd/"+l[1], "/"), "/dev/"+l[0]); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	for _, d := range []string{"/run/lock", "/run/netns", "/dev/net"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	// As udev does: opening the device loads its module.
	if err := unix.Mknod("/dev/net/tun", unix.S_IFCHR|0o666, int(unix.Mkdev(10, 200))); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("make /dev/net/tun: %w", err)
	}
	for limit, value := range map[int]uint64{
		unix.RLIMIT_MEMLOCK: unix.RLIM_INFINITY, // maps counted until Linux 5.11
		unix.RLIMIT_NOFILE:  1 << 16,
	} {
		if err := unix.Setrlimit(limit, &unix.Rlimit{Cur: value, Max: value}); err != nil {
			return fmt.Errorf("set limit %d: %w", limit, err)
		}
	}
	if err := unix.Sethostname([]byte("vm")); err != nil {
		return fmt.Errorf("set host name: %w", err)
	}
	if err := os.Chmod("/tmp", 0o1777); err != nil {
		return err
	}
	for _, kv := range []string{"HOME=/root", "USER=root", "TERM=dumb", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"} {
		name, value, _ := strings.Cut(kv, "=")
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	// Programs of packages are kept.
	if err := exec.Command("busybox", "--install", "-s").Run(); err != nil {
		return fmt.Errorf("install commands of busybox: %w", err)
	}
	return loopbackUp()
}

// enterRoot makes the root directory a mount that has a parent, as after a boot from a disk. Containers
// cannot leave the kernel's first mount, which an initramfs is (pivot_root(2)).
func enterRoot() error {
	const at = "/mnt"
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("/", at, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind the root directory: %w", err)
	}
	if err := os.Chdir(at); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root directory: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("enter the root directory: %w", err)
	}
	return os.Chdir("/")
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	defer unix.Close(fd)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP)
	return wrap(unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo), "set lo up")
}

// openLine opens a serial line in raw mode.
func openLine(name string) (*os.File, error) {
	f, err := os.OpenFile(name, os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	raw := &unix.Termios{Cflag: unix.CS8 | unix.CREAD | unix.CLOCAL | unix.B115200}
	raw.Cc[unix.VMIN] = 1
	return f, wrap(unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, raw), "set %s up", name)
}

// drain waits until all bytes are sent.
func drain(line *os.File) error {
	return wrap(unix.IoctlSetInt(int(line.Fd()), unix.TCSBRK, 1), "drain %s", line.Name())
}

// run runs the command, and also waits for orphans.
func (j *job) run(out io.Writer) (code int, err error) {
	program, err := exec.LookPath(j.Args[0])
	if err != nil {
		return 0, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	pid, err := syscall.ForkExec(program, j.Args, &syscall.ProcAttr{
		Dir: j.Dir, Env: append(os.Environ(), j.Env...),
		Files: []uintptr{null.Fd(), w.Fd(), w.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return 0, err
	}
	_ = w.Close()
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		_, _ = io.Copy(out, r)
	}()
	for {
		var status unix.WaitStatus
		switch ended, err := unix.Wait4(-1, &status, 0, nil); {
		case errors.Is(err, unix.EINTR), err == nil && ended != pid:
			continue
		case err != nil:
			return 0, fmt.Errorf("wait: %w", err)
		}
		code = status.ExitStatus()
		if status.Signaled() {
			fmt.Fprintf(out, "%s: %v\n", j.Args[0], status.Signal())
			code = 128 + int(status.Signal())
		}
		break
	}
	// Remaining processes may hold the pipe.
	select {
	case <-copied:
	case <-time.After(500 * time.Millisecond):
	}
	return code, nil
}

// uptime returns the kernel's uptime, which does not depend on changes of the clock.
func uptime() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &t)
	return time.Duration(t.Nano())
}
