// SPDX-License-Identifier: Apache-2.0

//go:build linux

package vm

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// layout must be changed with the format of the cache, so that no older files are used.
const layout = "1"

// Cache holds the parts of virtual machines, in a directory outside of checkouts.
type Cache struct{ dir string }

// OpenCache returns the user's cache.
func OpenCache() (*Cache, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return nil, err
	}
	c := &Cache{dir: filepath.Join(base, "tandem", "vm-"+layout)}
	return c, os.MkdirAll(c.dir, 0o755)
}

// parts are the files of a machine.
type parts struct {
	release                    string
	vmlinuz, modules, userland string
}

// parts downloads parts that are missing, or all of them to update them.
func (c *Cache) parts(ctx context.Context, k Kernel, update bool) (p parts, err error) {
	userland, err := c.made(ctx, "userland-"+userlandVersion(), update, func(ctx context.Context, dir string) error {
		f, err := os.Create(filepath.Join(dir, "userland.cpio"))
		if err != nil {
			return err
		}
		return errors.Join(buildUserland(ctx, f), f.Close())
	})
	if err != nil {
		return p, fmt.Errorf("fetch programs: %w", err)
	}
	kernel, err := c.made(ctx, "linux-"+k.Name, update, func(ctx context.Context, dir string) error { return buildKernel(ctx, k, dir) })
	if err != nil {
		return p, fmt.Errorf("fetch kernel %s: %w", k.Name, err)
	}
	release, err := os.ReadFile(filepath.Join(kernel, "release"))
	return parts{
		release: string(release), userland: filepath.Join(userland, "userland.cpio"),
		vmlinuz: filepath.Join(kernel, "vmlinuz"), modules: filepath.Join(kernel, "modules.cpio"),
	}, err
}

// Fetch makes sure that a kernel and the guest's programs are in the cache. With update, it
// downloads the newest ones.
func (c *Cache) Fetch(ctx context.Context, k Kernel, update bool) error {
	_, err := c.parts(ctx, k, update)
	return err
}

// made returns a directory of the cache, and creates it if it is missing. Concurrent callers wait,
// and a killed process leaves no directory that looks complete.
func (c *Cache) made(ctx context.Context, name string, update bool, build func(ctx context.Context, dir string) error) (_ string, err error) {
	dir := filepath.Join(c.dir, name)
	lock, err := os.OpenFile(dir+".lock", os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock %s: %w", dir, err)
	}
	if _, err := os.Stat(dir); err == nil && !update {
		return dir, nil
	}
	fresh := dir + ".new"
	if err := errors.Join(os.RemoveAll(fresh), os.Mkdir(fresh, 0o755)); err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(fresh)) }()
	fmt.Fprintf(os.Stderr, "Fetching %s into %s\n", name, c.dir)
	if err := build(ctx, fresh); err != nil {
		return "", err
	}
	return dir, errors.Join(os.RemoveAll(dir), os.Rename(fresh, dir))
}

// buildKernel fetches a kernel and its modules.
func buildKernel(ctx context.Context, k Kernel, dir string) (err error) {
	state, err := newAPT(ctx, k.Suite)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, state.close()) }()
	debs, err := state.kernel(ctx)
	if err != nil {
		return err
	}
	tree := filepath.Join(dir, "tree")
	t := kernelTree{dir: dir, tree: tree}
	for _, deb := range debs {
		if err := unpack(ctx, deb, t.read); err != nil {
			return err
		}
	}
	if t.release == "" || !t.vmlinuz {
		return fmt.Errorf("%s have no kernel and modules", debs)
	}
	if err := t.inflate(ctx); err != nil {
		return err
	}
	if err := t.pack(); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(tree), os.WriteFile(filepath.Join(dir, "release"), []byte(t.release), 0o644))
}

// kernelTree is a kernel that is being unpacked.
type kernelTree struct {
	dir, tree string
	release   string
	vmlinuz   bool
	builtin   string   // the text of modules.builtin
	files     []string // of modules, below the tree
}

// read keeps the kernel and wanted modules. Their paths in packages differ between releases
// of Debian.
func (t *kernelTree) read(r io.Reader) error {
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		name := merged(h.Name)
		if strings.HasPrefix(path.Base(name), "vmlinuz") {
			t.vmlinuz = true
			if err := write(filepath.Join(t.dir, "vmlinuz"), in); err != nil {
				return err
			}
		}
		below, ok := strings.CutPrefix(name, "usr/lib/modules/")
		if !ok {
			continue
		}
		release, below, _ := strings.Cut(below, "/")
		module, ok := strings.CutPrefix(below, "kernel/")
		switch {
		case below == "modules.builtin":
			text, err := io.ReadAll(in)
			if err != nil {
				return err
			}
			t.builtin = string(text)
		case ok && strings.Contains(path.Base(module), ".ko") && wantedModule(module):
			t.release = release
			t.files = append(t.files, module)
			if err := write(filepath.Join(t.tree, module), in); err != nil {
				return err
			}
		}
	}
}

// inflate decompresses modules once here: it would take the guest long each time.
func (t *kernelTree) inflate(ctx context.Context) error {
	var packed []string
	for i, f := range t.files {
		if strings.HasSuffix(f, ".xz") {
			packed = append(packed, filepath.Join(t.tree, f))
			t.files[i] = strings.TrimSuffix(f, ".xz")
		}
	}
	for some := range slices.Chunk(packed, 500) {
		if out, err := exec.CommandContext(ctx, "xz", append([]string{"--decompress"}, some...)...).CombinedOutput(); err != nil {
			return fmt.Errorf("inflate modules with xz, of the package xz-utils: %w: %s", err, out)
		}
	}
	return nil
}

// pack writes the modules and their index.
func (t *kernelTree) pack() (err error) {
	f, err := os.Create(filepath.Join(t.dir, "modules.cpio"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	a := newArchive(f)
	// Use the real path, as a link cannot contain directories.
	root := path.Join("usr/lib/modules", t.release)
	var modules []module
	for _, file := range t.files {
		object := filepath.Join(t.tree, file)
		m, err := readModule(object, path.Join("kernel", file))
		if err != nil {
			return err
		}
		modules = append(modules, m)
		if err := a.copy(path.Join(root, m.File), object); err != nil {
			return err
		}
	}
	for _, text := range [][2]string{
		{"modules.dep", dependencies(modules)}, {"modules.alias", aliases(modules)}, {"modules.builtin", t.builtin}, {"modules.symbols", ""},
	} {
		if err := a.text(path.Join(root, text[0]), text[1]); err != nil {
			return err
		}
	}
	return a.close()
}

func write(name string, r io.Reader) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	return errors.Join(err, f.Close())
}
