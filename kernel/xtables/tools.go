// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	goiptables "github.com/coreos/go-iptables/iptables"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// Variant is one of the two sets of programs.
type Variant uint8

// The variants.
const (
	NFT Variant = iota
	Legacy
)

func (v Variant) String() string {
	if v == NFT {
		return "nft"
	}
	return "legacy"
}

// lockWait is how many seconds a program waits for the lock, as in upstream.
const lockWait = 5

// Tools are the programs of a variant.
type Tools struct {
	variant  Variant
	families [inet.Families]programs
}

// programs are the programs of a family, or the reason why they are missing.
type programs struct {
	restore, save string
	wait          string
	single        *goiptables.IPTables
	missing       error
}

// New finds the programs of a variant in PATH and in the usual directories. It succeeds if
// one family has them; see Usable.
func New(v Variant) (*Tools, error) { return newTools(v, searchPath(), lockWait) }

func newTools(v Variant, dirs []string, wait int) (*Tools, error) {
	t := &Tools{variant: v}
	var errs []error
	for f := range t.families {
		t.families[f] = findPrograms(v, inet.Family(f), dirs, wait)
		errs = append(errs, t.families[f].missing)
	}
	if !slices.Contains(errs, nil) {
		return nil, fmt.Errorf("find programs in %s: %w", strings.Join(dirs, ":"), errors.Join(errs...))
	}
	return t, nil
}

// searchPath returns the directories to search for programs. The PATH of services often lacks the
// sbin directories.
func searchPath() (dirs []string) {
	all := append(filepath.SplitList(os.Getenv("PATH")), "/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin")
	for _, dir := range all {
		if filepath.IsAbs(dir) && !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

func lookUp(dirs []string, name string) (string, error) {
	for _, dir := range dirs {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("no %s", name)
}

// plain returns the name of a family's command, without the variant.
func plain(f inet.Family) string {
	if f == inet.IPv4 {
		return "iptables"
	}
	return "ip6tables"
}

// findPrograms prefers programs with the variant in their name. Programs with plain names are used
// if they are of the variant.
func findPrograms(v Variant, f inet.Family, dirs []string, wait int) programs {
	p, err := openPrograms(v, plain(f)+"-"+v.String(), dirs, wait)
	if err == nil {
		return p
	}
	p, err2 := openPrograms(v, plain(f), dirs, wait)
	if err2 == nil {
		return p
	}
	return programs{missing: fmt.Errorf("install package iptables: no programs for %s in the %s variant: %w; %w", f, v, err, err2)}
}

func openPrograms(v Variant, name string, dirs []string, wait int) (p programs, err error) {
	command, err := lookUp(dirs, name)
	if err != nil {
		return programs{}, err
	}
	if p.restore, err = lookUp(dirs, name+"-restore"); err != nil {
		return programs{}, err
	}
	if p.save, err = lookUp(dirs, name+"-save"); err != nil {
		return programs{}, err
	}
	is, err := variantOf(command)
	if err != nil {
		return programs{}, err
	}
	if is != v {
		return programs{}, fmt.Errorf("%s is of the %s variant", command, is)
	}
	p.wait = fmt.Sprint(wait)
	p.single, err = goiptables.New(goiptables.Path(command), goiptables.Timeout(wait))
	if err != nil {
		return programs{}, fmt.Errorf("open %s: %w", command, err)
	}
	// Before 1.6.2 restore ignores the lock. That release also added --random-fully.
	if !p.single.HasRandomFully() {
		a, b, c := p.single.GetIptablesVersion()
		return programs{}, fmt.Errorf("%s is version %d.%d.%d: install 1.6.2 or later", command, a, b, c)
	}
	return p, nil
}

// variantOf asks a command. Releases before 1.8 do not name a variant, and are all legacy.
func variantOf(command string) (Variant, error) {
	out, err := run(context.Background(), command, nil, "--version")
	if err != nil {
		return 0, err
	}
	if strings.Contains(out, "(nf_tables)") {
		return NFT, nil
	}
	return Legacy, nil
}

// Variant returns the variant of the programs.
func (t *Tools) Variant() Variant { return t.variant }

// RandomFully reports whether the target MASQUERADE supports --random-fully. Kernels do since 3.14.
func (t *Tools) RandomFully() bool {
	for _, p := range t.families {
		if p.missing == nil && !p.single.HasRandomFully() {
			return false
		}
	}
	return true
}

// Probe returns input for Restore that is refused if rules cannot have these matches. It creates
// and deletes a chain in each of the tables.
func Probe(matches string, tables ...string) []byte {
	const chain = "KUBE-PROXY-PROBE"
	var text []byte
	for _, table := range tables {
		text = fmt.Appendf(text, "*%s\n:%[2]s - [0:0]\n-A %[2]s %s -j RETURN\n-F %[2]s\n-X %[2]s\nCOMMIT\n", table, chain, matches)
	}
	return text
}

// Usable returns nil if rules of a family can be written, else the reason. It writes and deletes a
// chain, which leaves nothing behind but the empty built-in chains of the tables.
func (t *Tools) Usable(ctx context.Context, f inet.Family) error {
	if err := t.families[f].missing; err != nil {
		return err
	}
	if f == inet.IPv6 {
		// Not /proc/net, which shows the namespace of the main thread.
		if _, err := os.Stat("/proc/thread-self/net/if_inet6"); err != nil {
			return fmt.Errorf("IPv6 is disabled in the kernel: %w", err)
		}
	}
	tables := []string{"filter"}
	// The legacy variant writes whole tables, which may be large: one that can be written
	// implies that the other can, if it exists.
	if t.variant == NFT || !hasLegacyTable(f, "nat") {
		tables = append(tables, "nat")
	}
	// A match needs nft_compat with nf_tables.
	if err := t.Restore(ctx, f, Probe("-m addrtype --dst-type LOCAL", tables...)); err != nil {
		return fmt.Errorf("write to the filter and nat tables: %w", err)
	}
	return nil
}
