// SPDX-License-Identifier: Apache-2.0

//go:build linux

package vm

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// MirrorEnv sets another mirror than Debian's own, with the suites below debian and
// debian-security.
const MirrorEnv = "DEBIAN_MIRROR"

const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"

// apt downloads packages of one suite. It has its own state: it ignores what is installed or
// trusted on the machine, and changes nothing there.
type apt struct {
	dir string
	env []string
}

// newAPT reads the suite's lists into a new state, which close removes.
func newAPT(ctx context.Context, suite string) (_ *apt, err error) {
	for _, need := range [][2]string{{"apt-get", "apt"}, {"dpkg-deb", "dpkg"}, {keyring, "debian-archive-keyring"}} {
		_, err := exec.LookPath(need[0])
		if filepath.IsAbs(need[0]) {
			_, err = os.Stat(need[0])
		}
		if err != nil {
			return nil, fmt.Errorf("%w: kernels are fetched with %s of Debian", err, need[1])
		}
	}
	dir, err := os.MkdirTemp("", "tandem-apt-")
	if err != nil {
		return nil, err
	}
	a := &apt{dir: dir, env: append(os.Environ(), "APT_CONFIG="+filepath.Join(dir, "apt.conf"), "LC_ALL=C")}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.close())
		}
	}()
	for _, d := range []string{"state/lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	proxies, err := proxies(ctx)
	if err != nil {
		return nil, err
	}
	for name, text := range map[string]string{"status": "", "sources.list": sources(suite), "apt.conf": aptConfig(dir) + proxies} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return nil, err
		}
	}
	_, err = a.run(ctx, "apt-get", "update", "-qq", "-o", "APT::Update::Error-Mode=any")
	return a, wrap(err, "read the lists of %s", suite)
}

func (a *apt) close() error { return os.RemoveAll(a.dir) }

func sources(suite string) string {
	mirror := cmp.Or(os.Getenv(MirrorEnv), "http://deb.debian.org")
	line := func(archive, suite string) string {
		return fmt.Sprintf("deb [signed-by=%s] %s/%s %s main\n", keyring, mirror, archive, suite)
	}
	text := line("debian", suite)
	if suite != "sid" {
		text += line("debian-security", suite+"-security")
	}
	return text
}

func aptConfig(dir string) string {
	var b strings.Builder
	for _, kv := range [][2]string{
		{"Dir::State", dir + "/state"},
		{"Dir::State::status", dir + "/status"},
		{"Dir::Cache", dir + "/cache"},
		{"Dir::Etc::sourcelist", dir + "/sources.list"},
		{"Dir::Etc::sourceparts", "/dev/null"},
		{"Dir::Etc::main", "/dev/null"},
		{"Dir::Etc::parts", "/dev/null"},
		{"Dir::Etc::preferences", "/dev/null"},
		{"Dir::Etc::preferencesparts", "/dev/null"},
		{"APT::Architecture", "amd64"},
		{"APT::Architectures", "amd64"},
		{"APT::Sandbox::User", ""}, // the directories belong to the current user
		{"Acquire::Languages", "none"},
		{"Acquire::Retries", "3"},
		// Lists of archived suites have expired signatures.
		{"Acquire::Check-Valid-Until", "false"},
	} {
		fmt.Fprintf(&b, "%s \"%s\";\n", kv[0], kv[1])
	}
	return b.String()
}

// proxies returns the HTTP proxies of the machine's apt configuration.
func proxies(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "apt-config", "dump").Output()
	var b strings.Builder
	for line := range strings.Lines(string(out)) {
		if name, _, _ := strings.Cut(line, " "); strings.HasPrefix(name, "Acquire::http") {
			b.WriteString(line)
		}
	}
	return b.String(), wrap(err, "read the configuration of apt")
}

func (a *apt) run(ctx context.Context, name string, args ...string) (string, error) {
	c := exec.CommandContext(ctx, name, args...)
	var out, errs bytes.Buffer
	c.Env, c.Dir, c.Stdout, c.Stderr = a.env, filepath.Join(a.dir, "cache/archives"), &out, &errs
	err := c.Run()
	return out.String(), wrap(err, "%s: %s", name, strings.TrimSpace(errs.String()))
}

var (
	packageName   = regexp.MustCompile(`^[a-z0-9]\S*$`)
	kernelPackage = regexp.MustCompile(`^linux-(image|binary|modules)-[0-9].*-cloud-amd64$`)
)

// kernel downloads the packages of the suite's kernel, without their installation tools.
func (a *apt) kernel(ctx context.Context) ([]string, error) {
	out, err := a.run(ctx, "apt-cache", "depends", "--recurse", "--no-recommends", "--no-suggests",
		"--no-conflicts", "--no-breaks", "--no-replaces", "--no-enhances", metapackage)
	if err != nil {
		return nil, err
	}
	var names []string
	for line := range strings.Lines(out) {
		if line = strings.TrimRight(line, "\n"); packageName.MatchString(line) && kernelPackage.MatchString(line) {
			names = append(names, line)
		}
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("%s depends on no kernel", metapackage)
	}
	slices.Sort(names)
	if _, err := a.run(ctx, "apt-get", append([]string{"download", "-qq"}, slices.Compact(names)...)...); err != nil {
		return nil, err
	}
	return a.fetched()
}

// closure fetches packages with all they depend on.
func (a *apt) closure(ctx context.Context, names ...string) ([]string, error) {
	_, err := a.run(ctx, "apt-get", append([]string{"install", "-qq", "-y", "--no-install-recommends", "--download-only"}, names...)...)
	if err != nil {
		return nil, err
	}
	return a.fetched()
}

func (a *apt) fetched() ([]string, error) {
	return filepath.Glob(filepath.Join(a.dir, "cache/archives/*.deb"))
}

// unpack passes a package's files to read, as a tar archive.
func unpack(ctx context.Context, deb string, read func(io.Reader) error) (err error) {
	defer func() { err = wrap(err, "unpack %s", filepath.Base(deb)) }()
	c := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", deb)
	out, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return err
	}
	err = read(out)
	if err == nil {
		_, err = io.Copy(io.Discard, out) // the padding
	} else {
		_ = out.Close()
	}
	return errors.Join(err, c.Wait())
}

func wrap(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), err)
}
