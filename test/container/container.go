// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package container runs processes on nodes of the lab like a container runtime runs pods with
// host networking: with the file system of an image, the given mounts and capabilities, and
// nothing else of the node.
package container

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/lab"
)

// Container is one process. Mounts, IPC and what it writes are its own, and gone with it.
type Container struct {
	// Layers are the directories of the image, the topmost first.
	Layers []string
	// Dir is an empty directory, where the root is put together.
	Dir    string
	Mounts []Mount
	// Args are the command, an absolute path, and its arguments. Env are variables beside
	// PATH.
	Args, Env []string

	// HostPID has it see the processes of this machine, and not only its own.
	HostPID bool
	// ReadOnly is that of the root file system.
	ReadOnly bool
	// Privileged containers may write to /sys and /proc/sys, and see the cgroups of the
	// node. Others see none.
	Privileged bool
	// Capabilities are all there are, unless Privileged.
	Capabilities []string
	// AppArmor is the profile that confines it, unless empty.
	AppArmor string
	// Cgroup is that of the node, which Command knows.
	Cgroup string
}

// Mount has a container see a file or directory of the node. Where that is missing in the
// image, it is made.
type Mount struct {
	From     string // empty for a directory that is empty as well
	To       string
	ReadOnly bool
}

// asContainer has a copy of the running program become what is in it.
const asContainer = "TANDEM_TEST_AS_CONTAINER"

// Main turns a copy of the program into a container, if it was started as one, and does not
// return then. TestMain calls it first.
func Main() {
	text := os.Getenv(asContainer)
	if text == "" {
		return
	}
	runtime.LockOSThread() // capabilities are the thread's
	var c Container
	err := json.Unmarshal([]byte(text), &c)
	if err == nil {
		err = c.become()
	}
	fmt.Fprintf(os.Stderr, "start container: %v\n", err)
	os.Exit(1)
}

// Command prepares the container's process on a node.
func (c Container) Command(ctx context.Context, node *lab.Node) (*lab.Cmd, error) {
	c.Cgroup = node.CgroupPath()
	text, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := node.Command(ctx, exe)
	p.Env = []string{asContainer + "=" + string(text)}
	p.SysProcAttr.Cloneflags = unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS
	if !c.HostPID {
		p.SysProcAttr.Cloneflags |= unix.CLONE_NEWPID
	}
	return p, nil
}

// oldRoot is where the node's file system is while the container is made.
const oldRoot = "/.node"

// become replaces this process, which is in the container's namespaces, by its command.
func (c *Container) become() error {
	if err := c.enterImage(); err != nil {
		return err
	}
	if err := c.mountAll(); err != nil {
		return err
	}
	if err := errors.Join(unix.Unmount(oldRoot, unix.MNT_DETACH), os.Remove(oldRoot)); err != nil {
		return fmt.Errorf("leave the node's file system: %w", err)
	}
	if c.ReadOnly {
		if err := mount("", "/", "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			return err
		}
	}
	if err := c.dropCapabilities(); err != nil {
		return err
	}
	if err := confine(c.AppArmor); err != nil {
		return err
	}
	env := append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, c.Env...)
	return fmt.Errorf("run %s: %w", c.Args[0], syscall.Exec(c.Args[0], c.Args, env))
}

// enterImage makes the layers the root, before anything is mounted there: links in an image
// lead to what is in it.
func (c *Container) enterImage() error {
	// Mounts in this namespace must not propagate.
	if err := mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	// The writable layer is gone with the container.
	if err := mount("tmpfs", c.Dir, "tmpfs", 0, ""); err != nil {
		return err
	}
	root, upper, scratch := filepath.Join(c.Dir, "root"), filepath.Join(c.Dir, "upper"), filepath.Join(c.Dir, "work")
	for _, dir := range []string{root, upper, scratch, filepath.Join(upper, oldRoot)} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	layers := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", strings.Join(c.Layers, ":"), upper, scratch)
	if err := mount("overlay", root, "overlay", 0, layers); err != nil {
		return err
	}
	// With the names that they have behind any links of the node.
	for i := range c.Mounts {
		if m := &c.Mounts[i]; m.From != "" {
			real, err := filepath.EvalSymlinks(m.From)
			if err != nil {
				return err
			}
			m.From = real
		}
	}
	if err := unix.PivotRoot(root, filepath.Join(root, oldRoot)); err != nil {
		return fmt.Errorf("change the root: %w", err)
	}
	return os.Chdir("/")
}

func (c *Container) mountAll() error {
	readOnly := uintptr(unix.MS_RDONLY)
	if c.Privileged {
		readOnly = 0
	}
	for _, m := range []struct {
		kind, at string
		flags    uintptr
	}{{"proc", "/proc", 0}, {"tmpfs", "/dev", 0}, {"sysfs", "/sys", readOnly}} {
		if err := errors.Join(os.MkdirAll(m.at, 0o755), mount(m.kind, m.at, m.kind, m.flags, "")); err != nil {
			return err
		}
	}
	mounts := []Mount{{c.Cgroup, "/sys/fs/cgroup", false}}
	if !c.Privileged {
		if err := bind("/proc/sys", "/proc/sys", true); err != nil {
			return err
		}
		mounts = []Mount{{"", "/sys/fs/cgroup", true}}
	}
	for _, device := range []string{"/dev/null", "/dev/zero", "/dev/urandom"} {
		mounts = append(mounts, Mount{device, device, false})
	}
	for _, m := range append(mounts, c.Mounts...) {
		if err := m.mount(); err != nil {
			return err
		}
	}
	return nil
}

func (m Mount) mount() error {
	if m.From == "" {
		if err := os.MkdirAll(m.To, 0o755); err != nil {
			return err
		}
		flags := uintptr(0)
		if m.ReadOnly {
			flags = unix.MS_RDONLY
		}
		return mount("tmpfs", m.To, "tmpfs", flags, "")
	}
	from := filepath.Join(oldRoot, m.From)
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	if info.IsDir() {
		err = os.MkdirAll(m.To, 0o755)
	} else if err = os.MkdirAll(filepath.Dir(m.To), 0o755); err == nil {
		var f *os.File
		if f, err = os.OpenFile(m.To, os.O_CREATE, 0o644); err == nil {
			err = f.Close()
		}
	}
	if err != nil {
		return err
	}
	return bind(from, m.To, m.ReadOnly)
}

func bind(from, to string, readOnly bool) error {
	if err := mount(from, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil || !readOnly {
		return err
	}
	return mount("", to, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
}

func mount(source, target, kind string, flags uintptr, options string) error {
	if err := unix.Mount(source, target, kind, flags, options); err != nil {
		return fmt.Errorf("mount %s at %s: %w", source, target, err)
	}
	return nil
}

// capabilities are those that manifests of this project name, and what some take for enough.
var capabilities = map[string]uintptr{
	"BPF": unix.CAP_BPF, "PERFMON": unix.CAP_PERFMON,
	"NET_ADMIN": unix.CAP_NET_ADMIN, "NET_RAW": unix.CAP_NET_RAW, "SYS_ADMIN": unix.CAP_SYS_ADMIN,
	"SYS_MODULE": unix.CAP_SYS_MODULE, "SYS_PTRACE": unix.CAP_SYS_PTRACE, "SYS_RESOURCE": unix.CAP_SYS_RESOURCE,
}

// dropCapabilities leaves those of the container: what root runs has those that are in the
// bounding set.
func (c *Container) dropCapabilities() error {
	if c.Privileged {
		return nil
	}
	keep := map[uintptr]bool{}
	for _, name := range c.Capabilities {
		number, known := capabilities[name]
		if !known {
			return fmt.Errorf("capability %s is unknown here", name)
		}
		keep[number] = true
	}
	for number := uintptr(0); number <= unix.CAP_LAST_CAP; number++ {
		if keep[number] {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, number, 0, 0, 0); err != nil {
			return fmt.Errorf("drop capability %d: %w", number, err)
		}
	}
	return nil
}
