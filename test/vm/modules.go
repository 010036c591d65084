// SPDX-License-Identifier: Apache-2.0

//go:build linux

package vm

import (
	"debug/elf"
	"fmt"
	"path"
	"slices"
	"strings"
)

// module is a kernel module that the kernel or a tool may request.
type module struct {
	// File is its path below the kernel's directory of modules.
	Name, File string
	// Deps are modules to be loaded before it.
	Deps []string
	// Aliases are patterns of other names.
	Aliases []string
}

// wantedModules are the parts of the kernel's tree that tests and their tools may
// need: protocols, virtual devices, and their dependencies.
var wantedModules = []string{
	"net/", "lib/", "crypto/", "arch/x86/crypto/", "fs/overlayfs/",
	"drivers/net/bonding/", "drivers/net/dummy", "drivers/net/geneve", "drivers/net/ifb", "drivers/net/ipvlan/",
	"drivers/net/macvlan", "drivers/net/netkit", "drivers/net/netdevsim/", "drivers/net/tun", "drivers/net/veth",
	"drivers/net/vrf", "drivers/net/vxlan", "drivers/net/wireguard/", "drivers/net/bareudp",
}

// unwantedModules are large subtrees that are not needed.
var unwantedModules = []string{
	"net/bluetooth/", "net/wireless/", "net/mac80211/", "net/9p/", "net/ceph/", "net/sunrpc/", "net/rxrpc/", "net/smc/", "net/tipc/",
	"net/batman-adv/", "net/can/", "net/nfc/", "net/rds/", "net/ieee802154/", "net/mac802154/", "net/6lowpan/", "net/dccp/", "net/atm/",
}

// wantedModule reports whether a path in the kernel's tree of modules is wanted.
func wantedModule(file string) bool {
	has := func(prefix string) bool { return strings.HasPrefix(file, prefix) }
	return slices.ContainsFunc(wantedModules, has) && !slices.ContainsFunc(unwantedModules, has)
}

// readModule reads the metadata of a module.
func readModule(object, file string) (module, error) {
	m := module{Name: moduleName(file), File: file}
	f, err := elf.Open(object)
	if err != nil {
		return m, fmt.Errorf("read module %s: %w", file, err)
	}
	defer f.Close()
	section := f.Section(".modinfo")
	if section == nil {
		return m, fmt.Errorf("read module %s: no .modinfo", file)
	}
	data, err := section.Data()
	if err != nil {
		return m, fmt.Errorf("read module %s: %w", file, err)
	}
	for entry := range strings.SplitSeq(string(data), "\x00") {
		key, value, _ := strings.Cut(entry, "=")
		switch key {
		case "depends":
			for dep := range strings.SplitSeq(value, ",") {
				if dep != "" {
					m.Deps = append(m.Deps, moduleName(dep))
				}
			}
		case "softdep":
			if pre, ok := strings.CutPrefix(value, "pre:"); ok {
				pre, _, _ = strings.Cut(pre, "post:")
				for dep := range strings.FieldsSeq(pre) {
					m.Deps = append(m.Deps, moduleName(dep))
				}
			}
		case "alias":
			m.Aliases = append(m.Aliases, value)
		}
	}
	return m, nil
}

// moduleName returns the kernel's name of a module, given its file or name, which may
// contain dashes or underscores.
func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// dependencies is the text of modules.dep and aliases that of modules.alias, which
// Debian makes where a kernel is installed. Soft dependencies count as others.
func dependencies(modules []module) string {
	byName := map[string]module{}
	for _, m := range modules {
		byName[m.Name] = m
	}
	var b strings.Builder
	for _, m := range modules {
		// The last one is loaded first.
		var files []string
		seen := map[string]bool{m.Name: true}
		var add func(deps []string)
		add = func(deps []string) {
			for _, name := range deps {
				// Missing modules are built in.
				if dep, ok := byName[name]; ok && !seen[name] {
					seen[name] = true
					add(dep.Deps)
					files = append(files, dep.File)
				}
			}
		}
		add(m.Deps)
		slices.Reverse(files)
		fmt.Fprintf(&b, "%s: %s\n", m.File, strings.Join(files, " "))
	}
	return b.String()
}

func aliases(modules []module) string {
	var b strings.Builder
	for _, m := range modules {
		for _, a := range m.Aliases {
			fmt.Fprintf(&b, "alias %s %s\n", a, m.Name)
		}
	}
	return b.String()
}
