// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Sandbox is a network namespace with a cgroup: what nodes, pods and clients have
// in common.
type Sandbox struct {
	Name         string
	Addr4, Addr6 netip.Addr

	cgroups []string // what shut removes; the first is the one to attach to
	ns      *os.File
	nl      *netlink.Handle
	pool    *pool
	// portsInTurn is the lab's option.
	portsInTurn bool

	mu      sync.Mutex
	open    map[io.Closer]struct{} // servers and commands
	stopped bool
}

// newSandbox makes the namespace and starts the first thread in it. Threads and
// processes sit in the last of the cgroups, each of which it creates.
func newSandbox(name string, cgroups ...string) (_ *Sandbox, err error) {
	s := &Sandbox{Name: name, open: map[io.Closer]struct{}{}}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("sandbox %s: %w", name, err), s.shut())
		}
	}()
	for _, cg := range cgroups {
		if err := makeThreaded(cg); err != nil {
			return nil, err
		}
		s.cgroups = append(s.cgroups, cg)
	}
	s.pool = &pool{enter: func() error {
		if len(cgroups) > 0 {
			if err := writePID(cgroups[len(cgroups)-1], "cgroup.threads", unix.Gettid()); err != nil {
				return fmt.Errorf("enter cgroup: %w", err)
			}
		}
		if s.ns != nil {
			return wrap(unix.Setns(int(s.ns.Fd()), unix.CLONE_NEWNET), "enter network namespace")
		}
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("create network namespace: %w", err)
		}
		f, err := os.Open("/proc/thread-self/ns/net")
		s.ns = f
		return err
	}}
	return s, s.pool.do(s.prepare)
}

// prepare configures the new namespace. It runs inside it.
func (s *Sandbox) prepare() error {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	s.nl = nl
	for _, kv := range [][2]string{
		// Duplicate address detection keeps IPv6 unusable for a second or more.
		{"ipv6/conf/all/accept_dad", "0"},
		{"ipv6/conf/default/accept_dad", "0"},
		{"ipv6/conf/default/router_solicitations", "0"},
		// A new namespace inherits the setting of the initial one.
		{"ipv4/conf/all/rp_filter", "0"},
		{"ipv4/conf/default/rp_filter", "0"},
		// Turn off rate limits for ICMP errors.
		{"ipv4/icmp_ratelimit", "0"},
		{"ipv6/icmp/ratelimit", "0"},
		// Short connections in loops to one address would use up the ports.
		{"ipv4/tcp_tw_reuse", "1"},
	} {
		if err := sysctl(kv[0], kv[1]); err != nil {
			return err
		}
	}
	lo, err := nl.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	return wrap(nl.LinkSetUp(lo), "set lo up")
}

// sysctl writes a sysctl of /proc/sys/net, which belongs to the namespace of the calling
// thread.
func sysctl(name, value string) error {
	return wrap(os.WriteFile("/proc/sys/net/"+name, []byte(value), 0), "set sysctl net/%s", name)
}

// Do runs fn on an OS thread inside the sandbox: sockets it creates belong to the
// sandbox's namespace and cgroup, wherever they are used later. This does not apply to
// goroutines that fn starts. fn must not change the state of the thread, and must return
// errors instead of failing a test.
func (s *Sandbox) Do(fn func() error) error { return s.pool.do(fn) }

// CgroupPath is the directory of the cgroup that covers the sandbox; for a node
// that includes its pods.
func (s *Sandbox) CgroupPath() string {
	if len(s.cgroups) == 0 {
		return ""
	}
	return s.cgroups[0]
}

// NetNS is the network namespace. It stays owned by the sandbox.
func (s *Sandbox) NetNS() *os.File { return s.ns }

// NetNSPath names the namespace for other programs while the lab is open, as in
// nsenter --net=<path>. (Do not use ip netns exec: it remounts /sys, which hides the
// cgroups.)
func (s *Sandbox) NetNSPath() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), s.ns.Fd())
}

// NetNSInode identifies the namespace, as in the target of /proc/<pid>/ns/net.
func (s *Sandbox) NetNSInode() (uint64, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(s.ns.Fd()), &st)
	return st.Ino, wrap(err, "stat network namespace")
}

// Netlink talks to the sandbox's namespace from any thread.
func (s *Sandbox) Netlink() *netlink.Handle { return s.nl }

func (s *Sandbox) addr(v4 bool) netip.Addr {
	if v4 {
		return s.Addr4
	}
	return s.Addr6
}

// keep registers c to be closed together with the sandbox.
func (s *Sandbox) keep(c io.Closer) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return errors.Join(ErrClosed, c.Close())
	}
	s.open[c] = struct{}{}
	return nil
}

func (s *Sandbox) forget(c io.Closer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, c)
}

// shut removes the sandbox, which may be incomplete.
func (s *Sandbox) shut() error {
	s.mu.Lock()
	s.stopped = true
	open := s.open
	s.open = nil
	s.mu.Unlock()

	var errs []error
	for c := range open {
		errs = append(errs, c.Close())
	}
	for _, cg := range s.cgroups {
		errs = append(errs, killTree(cg))
	}
	if s.pool != nil {
		errs = append(errs, s.pool.close(removeLimit))
	}
	if s.nl != nil {
		s.nl.Close()
	}
	if s.ns != nil {
		errs = append(errs, s.ns.Close())
	}
	if len(s.cgroups) > 0 {
		errs = append(errs, removeTree(s.cgroups[0]))
	}
	return wrap(errors.Join(errs...), "remove %s", s.Name)
}

// Cmd is an exec.Cmd whose process starts inside a sandbox and is killed with it
// at the latest.
type Cmd struct {
	*exec.Cmd
	sandbox *Sandbox
	waited  sync.Once
	result  error
}

// Command prepares a command as exec.CommandContext does. The process has the
// sandbox's namespace and cgroup, and the caller's mounts: /sys still shows
// the devices of the namespace it was mounted from.
func (s *Sandbox) Command(ctx context.Context, name string, args ...string) *Cmd {
	c := &Cmd{Cmd: exec.CommandContext(ctx, name, args...), sandbox: s}
	c.SysProcAttr = &syscall.SysProcAttr{
		// Sent when the forking thread ends. Sandbox threads live as long as
		// the sandbox or, if that is killed, as the process.
		Pdeathsig: syscall.SIGKILL,
	}
	// Output pipes inherited by grandchildren must not block Wait for ever.
	c.WaitDelay = time.Second * Slower()
	return c
}

// Start forks on a thread of the sandbox, so that the child inherits its namespace and cgroup.
func (c *Cmd) Start() error {
	if err := c.sandbox.Do(c.Cmd.Start); err != nil {
		return err
	}
	return c.sandbox.keep(c)
}

// Wait waits for the process to end; it may be called more than once.
func (c *Cmd) Wait() error {
	c.waited.Do(func() {
		c.result = c.Cmd.Wait()
		c.sandbox.forget(c)
	})
	return c.result
}

// Run starts the command and waits for it.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output runs the command and returns its standard output.
func (c *Cmd) Output() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout = &out
	err := c.Run()
	return out.Bytes(), err
}

// CombinedOutput runs the command and returns what it printed.
func (c *Cmd) CombinedOutput() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	return out.Bytes(), err
}

// Close kills the process. Its exit status is not an error.
func (c *Cmd) Close() error {
	if c.Process == nil {
		return nil
	}
	_ = c.Process.Kill()
	_ = c.Wait()
	return nil
}
