// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// ErrNoCgroup2 means that no cgroup v2 hierarchy is mounted where this process
// can see it.
var ErrNoCgroup2 = errors.New("no cgroup2 filesystem is mounted")

// initCgroupNamespace is the inode of the first cgroup namespace, the same on
// every kernel (PROC_CGROUP_INIT_INO).
const initCgroupNamespace = "cgroup:[4026531835]"

// hierarchyRootInode is the inode of the topmost directory of a cgroup v2
// hierarchy. A mount made inside a cgroup namespace shows a lower directory.
const hierarchyRootInode = 1

// FindCgroup2Root returns where a cgroup v2 hierarchy is mounted, by the mount
// table under procRoot. Mounts of the whole hierarchy win over bind mounts of a
// part of it. The error says what an operator can do.
func FindCgroup2Root(procRoot string) (string, error) {
	path := filepath.Join(procRoot, "self", "mountinfo")
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("find cgroup2 root: %w: pass --ebpf-cgroup-root", err)
	}
	defer f.Close()
	mounts, err := parseMountinfo(f)
	if err != nil {
		return "", fmt.Errorf("find cgroup2 root: read %s: %w: pass --ebpf-cgroup-root", path, err)
	}
	if root := chooseCgroup2(mounts); root != "" {
		return root, nil
	}
	return "", fmt.Errorf("%w (see %s): %s", ErrNoCgroup2, path, cgroupMount)
}

// mount is one line of mountinfo.
type mount struct {
	root   string // the directory of the filesystem that is mounted
	point  string // where
	fsType string
}

func parseMountinfo(r io.Reader) ([]mount, error) {
	var mounts []mount
	scanner := bufio.NewScanner(r)
	// Overlay mounts list all their layers on one line.
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		// 36 35 98:0 /root /point opts optional… - fstype source superopts
		before, after, found := strings.Cut(scanner.Text(), " - ")
		head, tail := strings.Fields(before), strings.Fields(after)
		if !found || len(head) < 6 || len(tail) < 1 {
			continue
		}
		mounts = append(mounts, mount{root: unescape(head[3]), point: unescape(head[4]), fsType: tail[0]})
	}
	return mounts, scanner.Err()
}

// unescape undoes the octal escapes of mountinfo, which keep blanks and
// backslashes in paths from being taken for separators.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) && isOctal(s[i+1]) && isOctal(s[i+2]) && isOctal(s[i+3]) {
			b.WriteByte((s[i+1]-'0')<<6 | (s[i+2]-'0')<<3 | (s[i+3] - '0'))
			i += 3
			continue
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

func isOctal(c byte) bool { return '0' <= c && c <= '7' }

func chooseCgroup2(mounts []mount) string {
	// A later mount on the same point hides an earlier one.
	visible := map[string]mount{}
	for _, m := range mounts {
		visible[m.point] = m
	}
	var partial string
	for _, m := range mounts {
		if m.fsType != "cgroup2" || visible[m.point] != m {
			continue
		}
		if m.root == "/" {
			return m.point
		}
		if partial == "" {
			partial = m.point
		}
	}
	return partial
}

func probeCgroup2Root(_ context.Context, h *host, _ string) outcome {
	root := h.opts.CgroupRoot
	if root == "" {
		found, err := FindCgroup2Root(h.opts.ProcRoot)
		if errors.Is(err, ErrNoCgroup2) {
			return no(err)
		}
		if err != nil {
			return inconclusive(err)
		}
		root = found
	}
	o := fromMagic(root, unix.CGROUP2_SUPER_MAGIC, "cgroup2")
	if o.state == Yes {
		o.detail += ", " + cgroupScope(root, h.proc("self/ns/cgroup"))
	}
	return o
}

// cgroupScope says which processes a hook at root reaches. In a pod with a
// cgroup namespace of its own, a freshly mounted cgroup2 shows only the pod,
// and hooks there would serve no process outside of it: every report mentions that.
func cgroupScope(root, namespaceLink string) string {
	var stat unix.Stat_t
	scope := "extent unknown"
	if err := unix.Stat(root, &stat); err == nil {
		scope = "part of the hierarchy: only processes below it are served"
		if stat.Ino == hierarchyRootInode {
			scope = "root of the hierarchy"
		}
	}
	namespace, err := os.Readlink(namespaceLink)
	switch {
	case err != nil:
		return scope
	case namespace == initCgroupNamespace:
		return scope + ", host's cgroup namespace"
	}
	return scope + ", cgroup namespace of its own"
}

// probeCgroupReplace tries to replace a program on a directory that is no
// cgroup. A kernel that knows the flag gets as far as the bad target; one that
// does not rejects the flag first. Either way nothing is attached.
func probeCgroupReplace(context.Context, *host, string) outcome {
	prog, err := loadProgram(sockAddrProgram(ciliumebpf.AttachCGroupInet4Connect, returning(1)))
	if err != nil {
		return fromKernel(err, capBPFNet)
	}
	defer prog.Close()
	notCgroup, err := os.Open(os.DevNull)
	if err != nil {
		return inconclusive(err)
	}
	defer notCgroup.Close()
	err = link.RawAttachProgram(link.RawAttachProgramOptions{
		Target:  int(notCgroup.Fd()),
		Program: prog,
		Attach:  ciliumebpf.AttachCGroupInet4Connect,
		Flags:   unix.BPF_F_ALLOW_MULTI,
		Anchor:  link.ReplaceProgram(prog),
	})
	switch {
	case errors.Is(err, unix.EBADF):
		return yes("")
	case err == nil:
		return inconclusive(errors.New("the kernel accepted a target that is no cgroup"))
	}
	return fromKernel(err, capBPFNet)
}

// fromMagic answers whether a filesystem of one kind is mounted at path.
func fromMagic(path string, magic int64, kind string) outcome {
	var stat unix.Statfs_t
	err := unix.Statfs(path, &stat)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return no(&fs.PathError{Op: "statfs", Path: path, Err: err})
	case err != nil:
		return inconclusive(&fs.PathError{Op: "statfs", Path: path, Err: err})
	// Statfs_t.Type is 32 bits wide on some architectures, where large magics
	// turn negative: compare what the kernel compares.
	case uint32(stat.Type) != uint32(magic):
		return no(fmt.Errorf("%s is not a %s filesystem (magic %#x)", path, kind, uint32(stat.Type)))
	}
	return yes(path)
}
