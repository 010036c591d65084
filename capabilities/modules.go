// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// Many features live in modules that the kernel loads when they are first used.
// A probe that used them would load them, and probing must not change the host;
// so these look where the code is instead: in the symbol table (built in or
// loaded), or in the list of modules on disk (could be loaded).

// modulePresence says where the code of a module is.
type modulePresence int

const (
	moduleUnknown   modulePresence = iota // nothing readable tells
	moduleLoaded                          // built in or loaded
	moduleAvailable                       // on disk, not loaded
	moduleAbsent                          // nowhere
)

// moduleQuery names one module and a function that only it defines.
type moduleQuery struct{ module, symbol string }

// watchedSymbols are looked for in the one pass over the symbol table. All are
// referred to by address in the kernel, so that no compiler inlines them away.
var watchedSymbols = func() map[string]bool {
	watched := map[string]bool{
		"clsact_init":              true,
		"cls_bpf_classify":         true,
		"register_ip_vs_scheduler": true,
		"ip_set_create":            true,
		"nf_tables_newtable":       true,
		"nft_target_init":          true,
		"ipt_do_table":             true,
		"nf_conntrack_in":          true,
		"udp_diag_dump":            true,
		"udp_diag_destroy":         true,
	}
	for _, scheduler := range ipvsSchedulers {
		watched[schedulerSymbol(scheduler)] = true
	}
	return watched
}()

// kernelSymbols is what /proc/kallsyms told.
type kernelSymbols struct {
	found map[string]bool // by name, of the watched ones
	err   error
}

func (h *host) readSymbols() kernelSymbols {
	f, err := os.Open(h.proc("kallsyms"))
	if err != nil {
		return kernelSymbols{err: err}
	}
	defer f.Close()
	found, err := parseSymbols(f)
	return kernelSymbols{found, err}
}

// parseSymbols picks the watched names out of lines like
// "ffffffff81000000 T name [module]"; addresses may all be zero.
func parseSymbols(r io.Reader) (map[string]bool, error) {
	found := map[string]bool{}
	lines := 0
	scanner := bufio.NewScanner(r)
	for scanner.Scan() {
		lines++
		_, symbol, _ := bytes.Cut(scanner.Bytes(), []byte{' '})
		_, symbol, _ = bytes.Cut(symbol, []byte{' '})
		symbol, _, _ = bytes.Cut(symbol, []byte{'\t'})
		// Compilers append suffixes to static functions: "name.llvm.123".
		name, _, _ := bytes.Cut(symbol, []byte{'.'})
		if watchedSymbols[string(name)] {
			found[string(name)] = true
		}
	}
	if err := scanner.Err(); err != nil {
		return nil, err
	}
	if lines == 0 {
		// A sandbox hid the table: that is not a kernel without functions.
		return nil, errors.New("the kernel's symbol table is empty")
	}
	return found, nil
}

// module says where the code of a module is, and why that could not be told or
// is not enough. symbol may be empty.
func (h *host) module(name, symbol string) (modulePresence, error) {
	symbols := h.symbols()
	if !watchedSymbols[symbol] {
		// Its absence from the table would mean nothing.
		symbol = ""
	}
	if symbol != "" && symbols.found[symbol] {
		return moduleLoaded, nil
	}
	loaded, err := os.ReadFile(h.proc("modules"))
	switch {
	case err == nil && listsLoaded(string(loaded), name):
		return moduleLoaded, nil
	case errors.Is(err, fs.ErrNotExist) && symbol != "" && symbols.err == nil:
		return moduleAbsent, fmt.Errorf("%s is not built into this kernel, which has no loadable modules", name)
	}

	dir := filepath.Join(h.opts.ModulesRoot, h.release())
	builtin, builtinErr := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if builtinErr == nil && listsFile(string(builtin), name) {
		return moduleLoaded, nil
	}
	onDisk, err := os.ReadFile(filepath.Join(dir, "modules.dep"))
	switch {
	case err != nil:
		return moduleUnknown, fmt.Errorf("module %s is not loaded, and whether it could be is unknown: %w", name, err)
	case listsFile(string(onDisk), name):
		return moduleAvailable, fmt.Errorf("module %s is there but not loaded: modprobe %s", name, name)
	case builtinErr != nil:
		return moduleUnknown, fmt.Errorf("whether %s is built in is unknown: %w", name, builtinErr)
	}
	return moduleAbsent, fmt.Errorf("module %s is neither built in nor in %s", name, dir)
}

// listsLoaded looks for a module in /proc/modules, one "name size …" per line.
func listsLoaded(text, name string) bool {
	for line := range strings.Lines(text) {
		if first, _, _ := strings.Cut(line, " "); sameModule(first, name) {
			return true
		}
	}
	return false
}

// listsFile looks for a module in modules.builtin ("kernel/net/x.ko") or
// modules.dep ("kernel/net/x.ko.xz: kernel/net/y.ko.xz").
func listsFile(text, name string) bool {
	for line := range strings.Lines(text) {
		file, _, _ := strings.Cut(strings.TrimSpace(line), ":")
		base, _, isModule := strings.Cut(path.Base(file), ".ko")
		if isModule && sameModule(base, name) {
			return true
		}
	}
	return false
}

// sameModule compares names; the kernel takes "-" and "_" for the same.
func sameModule(a, b string) bool {
	return strings.ReplaceAll(a, "-", "_") == strings.ReplaceAll(b, "-", "_")
}

// fromModules answers Yes if all are loaded, No if one is nowhere, and
// otherwise Inconclusive: only loading them would tell whether they work.
func (h *host) fromModules(queries ...moduleQuery) outcome {
	var absent, unsure []error
	for _, query := range queries {
		switch presence, reason := h.module(query.module, query.symbol); presence {
		case moduleLoaded:
		case moduleAbsent:
			absent = append(absent, reason)
		default:
			unsure = append(unsure, reason)
		}
	}
	switch {
	case len(absent) > 0:
		return no(errors.Join(absent...))
	case len(unsure) > 0:
		return inconclusive(errors.Join(unsure...))
	}
	return yes("")
}
