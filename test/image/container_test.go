// SPDX-License-Identifier: Apache-2.0

//go:build linux

package image

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// asContainer has a copy of the test program become what is in it.
const asContainer = "TANDEM_TEST_AS_CONTAINER"

// container is a process as a container runtime starts it for a pod of the host's network.
type container struct {
	Layers []string // of the image, the topmost first
	Dir    string   // an empty directory, where the root is put together
	Mounts []volume
	Args   []string

	// ReadOnly is that of the root file system.
	ReadOnly bool
	// Privileged containers may write to /sys and /proc/sys, and see the cgroups of the
	// node. Others see their own.
	Privileged bool
	// Capabilities are all there are if Privileged.
	Capabilities []string
	// Cgroup is that of the node.
	Cgroup string
}

// volume is a file or directory of the node.
type volume struct {
	From, To string
	ReadOnly bool
}

// enter replaces this process, which is in mount and pid namespaces of its own. It runs
// before anything else does, and ends with what the container runs.
func enter(text string) error {
	runtime.LockOSThread() // capabilities are the thread's
	var c container
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return err
	}
	root := filepath.Join(c.Dir, "root")
	if err := c.assemble(root); err != nil {
		return err
	}
	// What was there before is stacked below the new root, and let go.
	if err := unix.Chdir(root); err != nil {
		return fmt.Errorf("go to the new root: %w", err)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := errors.Join(unix.Unmount(".", unix.MNT_DETACH), unix.Chdir("/")); err != nil {
		return fmt.Errorf("let go of the old root: %w", err)
	}
	if err := c.dropCapabilities(); err != nil {
		return err
	}
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	return fmt.Errorf("run %s: %w", c.Args[0], syscall.Exec(c.Args[0], c.Args, env))
}

func (c *container) assemble(root string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("leave the node's mounts alone: %w", err)
	}
	// The writable layer is gone with the container.
	if err := unix.Mount("tmpfs", c.Dir, "tmpfs", 0, ""); err != nil {
		return err
	}
	upper, scratch := filepath.Join(c.Dir, "upper"), filepath.Join(c.Dir, "work")
	for _, dir := range []string{root, upper, scratch} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	layers := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", strings.Join(c.Layers, ":"), upper, scratch)
	if err := unix.Mount("overlay", root, "overlay", 0, layers); err != nil {
		return fmt.Errorf("mount the layers of the image: %w", err)
	}

	readOnly := uintptr(unix.MS_RDONLY)
	cgroup := filepath.Join(c.Dir, "none")
	if c.Privileged {
		readOnly, cgroup = 0, c.Cgroup
	} else if err := os.Mkdir(cgroup, 0o755); err != nil {
		return err
	}
	for _, m := range []struct {
		kind, at string
		flags    uintptr
	}{{"proc", "proc", 0}, {"tmpfs", "dev", 0}, {"sysfs", "sys", readOnly}} {
		if err := unix.Mount(m.kind, filepath.Join(root, m.at), m.kind, m.flags, ""); err != nil {
			return fmt.Errorf("mount /%s: %w", m.at, err)
		}
	}
	mounts := []volume{{cgroup, "/sys/fs/cgroup", !c.Privileged}}
	if !c.Privileged {
		mounts = append(mounts, volume{filepath.Join(root, "proc/sys"), "/proc/sys", true})
	}
	for _, device := range []string{"/dev/null", "/dev/zero", "/dev/urandom"} {
		mounts = append(mounts, volume{device, device, false})
	}
	for _, v := range append(mounts, c.Mounts...) {
		if err := v.mount(root); err != nil {
			return fmt.Errorf("mount %s at %s: %w", v.From, v.To, err)
		}
	}
	if c.ReadOnly {
		return unix.Mount("", root, "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
	}
	return nil
}

func (v volume) mount(root string) error {
	to := filepath.Join(root, v.To)
	info, err := os.Stat(v.From)
	if err != nil {
		return err
	}
	if info.IsDir() {
		err = os.MkdirAll(to, 0o755)
	} else if err = os.MkdirAll(filepath.Dir(to), 0o755); err == nil {
		var f *os.File
		if f, err = os.OpenFile(to, os.O_CREATE, 0o644); err == nil {
			err = f.Close()
		}
	}
	if err != nil && !errors.Is(err, unix.EROFS) { // of /sys, where it is there already
		return err
	}
	if err := unix.Mount(v.From, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	if !v.ReadOnly {
		return nil
	}
	return unix.Mount("", to, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
}

// capabilities are those that manifests of this project name.
var capabilities = map[string]uintptr{
	"NET_ADMIN": unix.CAP_NET_ADMIN, "NET_RAW": unix.CAP_NET_RAW, "SYS_ADMIN": unix.CAP_SYS_ADMIN,
	"SYS_MODULE": unix.CAP_SYS_MODULE, "SYS_PTRACE": unix.CAP_SYS_PTRACE, "SYS_RESOURCE": unix.CAP_SYS_RESOURCE,
}

// dropCapabilities leaves those of the container: what root runs has those that are in the
// bounding set.
func (c *container) dropCapabilities() error {
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
