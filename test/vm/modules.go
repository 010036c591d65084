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

// indexFile is where the guest finds what modules there are. Debian's packages have no
// modules.dep, which is made where they are installed.
const indexFile = "/lib/modules/index.json"

// index tells what to load for a name that the kernel or a tool asks for.
type index struct {
	Modules []module
	// Builtin are those that need no loading.
	Builtin []string
}

type module struct {
	Name, File string
	// Deps have to be loaded before.
	Deps []string
	// Aliases are patterns of other names.
	Aliases []string
}

// wantedModules are the parts of the kernel's tree that tests and their tools may
// ask for: protocols, virtual devices, and what those are made of.
var wantedModules = []string{
	"net/", "lib/", "crypto/", "arch/x86/crypto/", "fs/overlayfs/",
	"drivers/net/bonding/", "drivers/net/dummy", "drivers/net/geneve", "drivers/net/ifb", "drivers/net/ipvlan/",
	"drivers/net/macvlan", "drivers/net/netkit", "drivers/net/netdevsim/", "drivers/net/tun", "drivers/net/veth",
	"drivers/net/vrf", "drivers/net/vxlan", "drivers/net/wireguard/", "drivers/net/bareudp",
}

// unwantedModules are below them, and large.
var unwantedModules = []string{
	"net/bluetooth/", "net/wireless/", "net/mac80211/", "net/9p/", "net/ceph/", "net/sunrpc/", "net/rxrpc/", "net/smc/", "net/tipc/",
	"net/batman-adv/", "net/can/", "net/nfc/", "net/rds/", "net/ieee802154/", "net/mac802154/", "net/6lowpan/", "net/dccp/", "net/atm/",
}

// wantedModule tells of a path below the kernel's tree of modules.
func wantedModule(file string) bool {
	has := func(prefix string) bool { return strings.HasPrefix(file, prefix) }
	return slices.ContainsFunc(wantedModules, has) && !slices.ContainsFunc(unwantedModules, has)
}

// readModule reads what a module says of itself. File is where the guest has it.
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
			if !strings.Contains(value, ":") { // those are of devices
				m.Aliases = append(m.Aliases, value)
			}
		}
	}
	return m, nil
}

// moduleName is what the kernel calls the module of a file, or of a name: both
// dashes and underscores are used.
func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// resolve lists the modules to load for a name or an alias, in order. Nothing has
// to be for what is built in.
func (x *index) resolve(name string) ([]module, error) {
	wanted := moduleName(name)
	if slices.Contains(x.Builtin, wanted) {
		return nil, nil
	}
	var order []module
	seen := map[string]bool{}
	var load func(m module)
	load = func(m module) {
		if seen[m.Name] {
			return
		}
		seen[m.Name] = true
		for _, dep := range m.Deps {
			// What is not there is built in, or a soft dependency.
			if i := slices.IndexFunc(x.Modules, func(m module) bool { return m.Name == dep }); i >= 0 {
				load(x.Modules[i])
			}
		}
		order = append(order, m)
	}
	for _, m := range x.Modules {
		if m.Name == wanted || slices.ContainsFunc(m.Aliases, func(a string) bool { return aliasMatches(a, name) }) {
			load(m)
		}
	}
	if len(order) == 0 {
		return nil, fmt.Errorf("there is no module %s", name)
	}
	return order, nil
}

func aliasMatches(alias, name string) bool {
	if alias == name || strings.ReplaceAll(alias, "-", "_") == strings.ReplaceAll(name, "-", "_") {
		return true
	}
	ok, err := path.Match(alias, name)
	return err == nil && ok
}
