// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Names of cgroups begin so: those that hold a process with its labs, and those of Domain.
const (
	cgroupPrefix = "tandem-lab-"
	domainPrefix = "tandem-domain-"
)

// removeLimit bounds the wait for ended threads and processes to leave a cgroup:
// the kernel removes them from it a little after they have ended.
const removeLimit = 5 * time.Second

// processRoot is the cgroup that holds this process while it has labs open. Labs of
// one process share it, as a process can be in one domain only.
var processRoot struct {
	mu       sync.Mutex
	labs     int
	next     int    // number of the next lab
	path     string // our root
	original string // where the process was before
}

// cgroupMount finds where cgroup2 is mounted; on hybrid hosts it sits beside the v1
// hierarchies, which the lab never touches. hostPath is the cgroup shown at dir.
func cgroupMount() (dir, hostPath string, err error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", "", err
	}
	for line := range strings.Lines(string(mounts)) {
		before, after, ok := strings.Cut(line, " - ")
		f := strings.Fields(before)
		if !ok || len(f) < 6 || !strings.HasPrefix(after, "cgroup2 ") {
			continue
		}
		if !slices.Contains(strings.Split(f[5], ","), "rw") {
			continue
		}
		// Prefer the mount that is nearest to the root of the hierarchy.
		if dir == "" || len(f[3]) < len(hostPath) {
			hostPath, dir = f[3], f[4]
		}
	}
	if dir == "" {
		return "", "", errors.New("cgroup2 is not mounted writable")
	}
	return dir, hostPath, nil
}

// ownCgroup returns the directory of this process' cgroup2 membership.
func ownCgroup(mount, hostPath string) (string, error) {
	membership, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(membership)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			rel, err := filepath.Rel(hostPath, path)
			if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
				return "", fmt.Errorf("own cgroup %s is not below the one mounted, %s", path, hostPath)
			}
			return filepath.Join(mount, rel), nil
		}
	}
	return "", errors.New("the process is in no cgroup2")
}

// openLabCgroup makes a threaded cgroup for one lab, and moves the process below
// the common root when it is its first.
func openLabCgroup() (string, error) {
	r := &processRoot
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.labs == 0 {
		if err := enterProcessRoot(); err != nil {
			return "", err
		}
	}
	path := filepath.Join(r.path, "lab"+strconv.Itoa(r.next))
	if err := makeThreaded(path); err != nil {
		if r.labs == 0 {
			err = errors.Join(err, leaveProcessRoot())
		}
		return "", err
	}
	r.next++
	r.labs++
	return path, nil
}

// Domain makes a cgroup beside those of the lab, which are threaded, for a program that manages
// cgroups of its own, such as kubelet. Close ends the processes in it and removes it.
func (l *Lab) Domain(name string) (path string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return "", ErrClosed
	}
	mount, owner := filepath.Split(processRoot.path)
	path = filepath.Join(mount, fmt.Sprintf("%s%s.%s-%s", domainPrefix, strings.TrimPrefix(owner, cgroupPrefix), filepath.Base(l.cgroup), name))
	if err := os.Mkdir(path, 0o755); err != nil {
		return "", fmt.Errorf("create cgroup: %w", err)
	}
	l.domains = append(l.domains, path)
	return path, nil
}

// RemoveCgroup ends the processes in a cgroup that Domain made, and removes it.
func RemoveCgroup(path string) error { return errors.Join(killTree(path), removeTree(path)) }

func closeLabCgroup(path string) error {
	r := &processRoot
	r.mu.Lock()
	defer r.mu.Unlock()
	err := removeTree(path)
	r.labs--
	if r.labs == 0 {
		err = errors.Join(err, leaveProcessRoot())
	}
	return err
}

func enterProcessRoot() error {
	r := &processRoot
	mount, hostPath, err := cgroupMount()
	if err != nil {
		return err
	}
	if r.original, err = ownCgroup(mount, hostPath); err != nil {
		return err
	}
	name, err := ownerName()
	if err != nil {
		return err
	}
	r.path = filepath.Join(mount, name)
	if err := os.Mkdir(r.path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("create lab cgroup: %w", err)
	}
	if err := writePID(r.path, "cgroup.procs", os.Getpid()); err != nil {
		return errors.Join(fmt.Errorf("move own process: %w", err), os.Remove(r.path))
	}
	// Adopt orphans of commands: in containers, process 1 often does not wait for them,
	// so that they remain as zombies.
	if err := adoptOrphans(true); err != nil {
		return errors.Join(err, leaveProcessRoot())
	}
	return nil
}

func adoptOrphans(on bool) error {
	arg := uintptr(0)
	if on {
		arg = 1
	}
	return wrap(unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, arg, 0, 0, 0), "become subreaper")
}

func leaveProcessRoot() error {
	r := &processRoot
	err := adoptOrphans(false)
	if err := writePID(r.original, "cgroup.procs", os.Getpid()); err != nil {
		return fmt.Errorf("move own process back: %w", err)
	}
	return errors.Join(err, removeTree(r.path))
}

// makeThreaded creates one cgroup. Each level has to be switched by itself: below
// a threaded cgroup a new one starts out unusable ("domain invalid").
func makeThreaded(path string) error {
	if err := os.Mkdir(path, 0o755); err != nil {
		return fmt.Errorf("create cgroup: %w", err)
	}
	if err := os.WriteFile(filepath.Join(path, "cgroup.type"), []byte("threaded"), 0); err != nil {
		return errors.Join(fmt.Errorf("make cgroup threaded: %w", err), os.Remove(path))
	}
	return nil
}

func writePID(cgroup, file string, pid int) error {
	return os.WriteFile(filepath.Join(cgroup, file), []byte(strconv.Itoa(pid)), 0)
}

// removeTree removes a cgroup and those below it, children first.
func removeTree(path string) error {
	var dirs []string
	err := filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, p)
		}
		return nil // removed in the meantime, or a file
	})
	slices.Reverse(dirs)
	for _, dir := range dirs {
		err = errors.Join(err, removeCgroup(dir))
	}
	return err
}

func removeCgroup(dir string) error {
	deadline := time.Now().Add(removeLimit)
	for wait := 50 * time.Microsecond; ; wait = min(2*wait, 20*time.Millisecond) {
		err := unix.Rmdir(dir)
		switch {
		case err == nil, errors.Is(err, unix.ENOENT):
			return nil
		case !errors.Is(err, unix.EBUSY), time.Now().After(deadline):
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		}
		time.Sleep(wait)
	}
}

// killTree ends every process in the cgroup and below, except this one, until
// none is left. Commands may have started others, and those may have forked
// away from their parent, but none can leave the cgroup unnoticed.
// (cgroup.kill does not work for threaded cgroups.)
func killTree(path string) error {
	deadline := time.Now().Add(removeLimit)
	killed := map[int]bool{}
	for wait := 50 * time.Microsecond; ; wait = min(2*wait, 20*time.Millisecond) {
		pids := foreignProcesses(path)
		if len(pids) == 0 {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes %v in %s do not end", pids, path)
		}
		for _, pid := range pids {
			killed[pid] = true
			_ = unix.Kill(pid, unix.SIGKILL) // gone already is fine
		}
		time.Sleep(wait)
	}
	// Orphans became children of this process (see enterProcessRoot), which must wait for
	// them. For other processes, Wait4 returns an error at once.
	for pid := range killed {
		for {
			if _, err := unix.Wait4(pid, nil, 0, nil); !errors.Is(err, unix.EINTR) {
				break
			}
		}
	}
	return nil
}

// foreignProcesses lists the processes with a thread in the cgroup or below.
func foreignProcesses(path string) []int {
	var pids []int
	_ = filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil
		}
		// cgroup.procs can not be read in a threaded cgroup.
		tids, err := os.ReadFile(filepath.Join(p, "cgroup.threads"))
		if err != nil {
			return nil
		}
		for _, tid := range strings.Fields(string(tids)) {
			pid := threadGroup(tid)
			if pid > 0 && pid != os.Getpid() && !slices.Contains(pids, pid) {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	return pids
}

// threadGroup returns the process of a thread, 0 if it is gone.
func threadGroup(tid string) int {
	status, err := os.ReadFile("/proc/" + tid + "/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "Tgid:"); ok {
			pid, _ := strconv.Atoi(strings.TrimSpace(v))
			return pid
		}
	}
	return 0
}

// ownerName identifies this process uniquely. Pids are reused, so it includes the start
// time; they are valid only within a pid namespace, so it includes that as well.
func ownerName() (string, error) {
	ns, err := pidNamespace()
	if err != nil {
		return "", err
	}
	start, err := startTime(os.Getpid())
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s%s-%d-%s", cgroupPrefix, ns, os.Getpid(), start), nil
}

func pidNamespace() (string, error) {
	link, err := os.Readlink("/proc/self/ns/pid") // pid:[4026531836]
	if err != nil {
		return "", err
	}
	return strings.Trim(strings.TrimPrefix(link, "pid:"), "[]"), nil
}

// startTime reads when a process started, in clock ticks since boot.
func startTime(pid int) (string, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	// The command name, in parentheses, can hold spaces and parentheses.
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(f) < 20 {
		return "", fmt.Errorf("read start time of process %d: %d fields", pid, len(f))
	}
	return f[19], nil
}

// Sweep removes what labs of dead processes left behind: their cgroups, and
// processes in them. It skips labs of other pid namespaces, as it cannot tell whether
// their owners run.
func Sweep() error {
	mount, _, err := cgroupMount()
	if err != nil {
		return err
	}
	ns, err := pidNamespace()
	if err != nil {
		return err
	}
	left, err := filepath.Glob(filepath.Join(mount, cgroupPrefix+ns+"-*"))
	if err != nil {
		return err
	}
	domains, err := filepath.Glob(filepath.Join(mount, domainPrefix+ns+"-*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range append(left, domains...) {
		_, name, _ := strings.Cut(filepath.Base(path), ns+"-")
		name, _, _ = strings.Cut(name, ".") // before what Domain adds
		pid, start, ok := strings.Cut(name, "-")
		owner, err := strconv.Atoi(pid)
		if !ok || err != nil {
			continue // not made by a lab
		}
		if s, err := startTime(owner); err == nil && s == start {
			continue
		} else if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, killTree(path), removeTree(path))
	}
	return errors.Join(errs...)
}
