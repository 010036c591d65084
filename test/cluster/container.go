// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/test/lab"
)

// containerEnv tells a copy of the running program to become a container.
const containerEnv = "TANDEM_CLUSTER_CONTAINER"

// container is what a container runtime makes of a privileged container in the network
// of its host: processes and mounts are its own, the node's cgroups are at /sys/fs/cgroup,
// neither bpffs nor the host's other mounts are there. Its image is this machine's file
// system, what it writes is lost.
type container struct {
	// Root is an empty directory.
	Root string
	// Cgroup is the root of the node's.
	Cgroup string
	// Binds are files and directories of the host. Those that are missing in the image
	// are made.
	Binds []bind
	// Env and Command are those of the process, whose binary is an absolute path.
	Env, Command []string
}

type bind struct {
	Source, Target string
	ReadOnly       bool
}

// Main turns a copy of the program into a container, if it was started as one, and does not
// return then. TestMain calls it first.
func Main() {
	lab.Main()
	text := os.Getenv(containerEnv)
	if text == "" {
		return
	}
	var c container
	err := json.Unmarshal([]byte(text), &c)
	if err == nil {
		err = c.become()
	}
	fmt.Fprintf(os.Stderr, "start container: %v\n", err)
	os.Exit(1)
}

// command prepares the container's process on a node.
func (c container) command(ctx context.Context, node *lab.Node) (*lab.Cmd, error) {
	text, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := node.Command(ctx, exe)
	p.Env = append(os.Environ(), containerEnv+"="+string(text))
	p.SysProcAttr.Cloneflags = unix.CLONE_NEWNS | unix.CLONE_NEWPID
	return p, nil
}

// oldRoot is where the host's file system is while the container is made.
const oldRoot = "/.host"

// become runs in the container's namespaces.
func (c container) become() error {
	// What is mounted here is nobody else's business.
	if err := mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := mount("tmpfs", c.Root, "tmpfs", 0, ""); err != nil {
		return err
	}
	layer := func(name string) string { return filepath.Join(c.Root, name) }
	root := layer("root")
	for _, path := range []string{root, layer("work"), layer("upper"), filepath.Join(layer("upper"), oldRoot)} {
		if err := os.Mkdir(path, 0o755); err != nil {
			return err
		}
	}
	if err := mount("overlay", root, "overlay", 0, fmt.Sprintf("lowerdir=/,upperdir=%s,workdir=%s", layer("upper"), layer("work"))); err != nil {
		return err
	}
	if err := unix.PivotRoot(root, filepath.Join(root, oldRoot)); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	for _, m := range []struct{ kind, target string }{{"proc", "/proc"}, {"sysfs", "/sys"}, {"tmpfs", "/run"}, {"tmpfs", "/tmp"}} {
		if err := mount(m.kind, m.target, m.kind, 0, ""); err != nil {
			return err
		}
	}
	for _, b := range append([]bind{{Source: "/dev", Target: "/dev"}, {Source: c.Cgroup, Target: "/sys/fs/cgroup"}}, c.Binds...) {
		if err := b.mount(); err != nil {
			return err
		}
	}
	if err := unix.Unmount(oldRoot, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leave the host's file system: %w", err)
	}
	return fmt.Errorf("run %s: %w", c.Command[0], syscall.Exec(c.Command[0], c.Command, c.Env))
}

func (b bind) mount() error {
	source := filepath.Join(oldRoot, b.Source)
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	if info.IsDir() {
		err = os.MkdirAll(b.Target, 0o755)
	} else if err = os.MkdirAll(filepath.Dir(b.Target), 0o755); err == nil {
		var f *os.File
		if f, err = os.OpenFile(b.Target, os.O_CREATE, 0o644); err == nil {
			err = f.Close()
		}
	}
	if err != nil {
		return err
	}
	if err := mount(source, b.Target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil || !b.ReadOnly {
		return err
	}
	return mount("none", b.Target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
}

func mount(source, target, kind string, flags uintptr, options string) error {
	if err := unix.Mount(source, target, kind, flags, options); err != nil {
		return fmt.Errorf("mount %s at %s: %w", source, target, err)
	}
	return nil
}
