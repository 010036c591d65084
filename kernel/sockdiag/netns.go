// SPDX-License-Identifier: Apache-2.0

//go:build linux

package sockdiag

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// NetNS is a network namespace that is being visited.
type NetNS struct {
	Inode uint64 // of nsfs, the number in net:[…]
	Path  string // where it was found
}

// ForEachNetNS runs fn once in every network namespace that it can find: those of the
// processes under procRoot (usually /proc), and those bind-mounted by name, as by
// container runtimes and ip netns. fn runs on a locked thread in the namespace.
// Goroutines that fn starts do not.
//
// An error in one namespace does not stop the visit; the errors are joined. Processes
// that end meanwhile are no error. A process whose namespace cannot be opened is
// reported (fs.ErrPermission). Namespaces that exist only in another pid namespace, or
// in another mount namespace than those of procRoot, are not found.
func ForEachNetNS(ctx context.Context, procRoot string, fn func(NetNS) error) error {
	var err error
	var panicked any
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = errors.New("visit network namespaces: the function called runtime.Goexit")
		defer func() { panicked = recover() }()
		err = forEachNetNS(ctx, procRoot, fn)
	}()
	<-done
	if panicked != nil {
		panic(panicked)
	}
	return err
}

func forEachNetNS(ctx context.Context, procRoot string, fn func(NetNS) error) (err error) {
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("visit network namespaces: %w", err)
	}
	defer home.Close()
	defer func() {
		// If the thread cannot return, it stays locked and ends with this
		// goroutine.
		if herr := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); herr != nil {
			err = errors.Join(err, fmt.Errorf("return to own network namespace: %w", herr))
			return
		}
		runtime.UnlockOSThread()
	}()

	v := &visitor{fn: fn, visited: map[uint64]bool{}}
	if err := v.processes(ctx, procRoot); err != nil {
		return fmt.Errorf("visit network namespaces: %w", err)
	}
	v.mounts(ctx, procRoot)
	return errors.Join(append(v.errs, ctx.Err())...)
}

type visitor struct {
	fn      func(NetNS) error
	visited map[uint64]bool
	errs    []error
}

func (v *visitor) processes(ctx context.Context, procRoot string) error {
	procs, err := os.ReadDir(procRoot)
	if err != nil {
		return err
	}
	var denied error
	unseen := 0
	for _, p := range procs {
		if ctx.Err() != nil {
			break
		}
		if _, err := strconv.ParseUint(p.Name(), 10, 32); err != nil {
			continue
		}
		path := filepath.Join(procRoot, p.Name(), "ns", "net")
		// Most processes share a namespace. Reading the link is much cheaper than
		// opening it.
		target, err := os.Readlink(path)
		if ino, ok := nsInode(target); err == nil && ok && v.visited[ino] {
			continue
		}
		if err := v.visit(path); err != nil && !gone(err) {
			denied = err
			unseen++
		}
	}
	if denied != nil {
		v.errs = append(v.errs, fmt.Errorf("namespaces of %d processes cannot be opened, last: %w", unseen, denied))
	}
	return nil
}

func (v *visitor) mounts(ctx context.Context, procRoot string) {
	for ino, paths := range mounted(procRoot) {
		var errs []error
		for _, path := range paths {
			if v.visited[ino] || ctx.Err() != nil {
				break
			}
			if err := v.visit(path); err != nil && !gone(err) {
				errs = append(errs, err)
			}
		}
		if !v.visited[ino] { // none of the paths worked
			v.errs = append(v.errs, errs...)
		}
	}
}

// visit runs fn in the namespace at the path, unless it was visited before. It returns
// an error only if the path cannot be opened.
func (v *visitor) visit(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	// Use the inode of the open file: the pid may have been reused.
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	if v.visited[st.Ino] {
		return nil
	}
	v.visited[st.Ino] = true
	if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
		v.errs = append(v.errs, fmt.Errorf("enter network namespace %s: %w", path, err))
		return nil
	}
	if err := v.fn(NetNS{Inode: st.Ino, Path: path}); err != nil {
		v.errs = append(v.errs, fmt.Errorf("network namespace %d (%s): %w", st.Ino, path, err))
	}
	return nil
}

// mounted returns the paths where namespaces are bind-mounted, by inode. It reads the
// mounts of this process and of process 1, which are the host's if procRoot is.
func mounted(procRoot string) map[uint64][]string {
	paths := map[uint64][]string{}
	for _, src := range []struct{ mountinfo, root string }{
		{"/proc/self/mountinfo", "/"},
		{filepath.Join(procRoot, "1", "mountinfo"), filepath.Join(procRoot, "1", "root")},
	} {
		text, err := os.ReadFile(src.mountinfo)
		if err != nil {
			continue // the namespaces of processes are found without it
		}
		for line := range strings.Lines(string(text)) {
			before, after, _ := strings.Cut(line, " - ")
			f := strings.Fields(before)
			if len(f) < 5 || !strings.HasPrefix(after, "nsfs ") {
				continue
			}
			if ino, ok := nsInode(f[3]); ok {
				paths[ino] = append(paths[ino], filepath.Join(src.root, unescape(f[4])))
			}
		}
	}
	return paths
}

// nsInode parses "net:[4026531840]".
func nsInode(s string) (uint64, bool) {
	s, ok := strings.CutPrefix(s, "net:[")
	if !ok {
		return 0, false
	}
	ino, err := strconv.ParseUint(strings.TrimSuffix(s, "]"), 10, 64)
	return ino, err == nil
}

// unescape decodes the octal escapes of mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
}
