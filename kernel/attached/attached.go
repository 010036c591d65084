// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package attached lists the BPF programs, whoever attached them, that can see or change
// connections of this host: on cgroups, and on network devices by tc and XDP.
package attached

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Program is an attached program.
type Program struct {
	// Name is what its author called it, at most 15 characters; empty if this process may not
	// open it, which needs CAP_SYS_ADMIN.
	Name string `json:"name"`
	ID   uint32 `json:"id"`
	// Hook is connect4, sendmsg4 and so on for cgroups; tcx ingress, tcx egress, clsact ingress,
	// clsact egress or xdp for devices.
	Hook string `json:"hook"`
	// Cgroup is its directory, or Device the name of its device.
	Cgroup string `json:"cgroup,omitempty"`
	Device string `json:"device,omitempty"`
}

// cgroupHooks are those that can change where a connection goes.
var cgroupHooks = []struct {
	name string
	at   ciliumebpf.AttachType
}{
	{"connect4", ciliumebpf.AttachCGroupInet4Connect}, {"connect6", ciliumebpf.AttachCGroupInet6Connect},
	{"sendmsg4", ciliumebpf.AttachCGroupUDP4Sendmsg}, {"sendmsg6", ciliumebpf.AttachCGroupUDP6Sendmsg},
	{"recvmsg4", ciliumebpf.AttachCGroupUDP4Recvmsg}, {"recvmsg6", ciliumebpf.AttachCGroupUDP6Recvmsg},
	{"getpeername4", ciliumebpf.AttachCgroupInet4GetPeername}, {"getpeername6", ciliumebpf.AttachCgroupInet6GetPeername},
	{"bind4", ciliumebpf.AttachCGroupInet4Bind}, {"bind6", ciliumebpf.AttachCGroupInet6Bind},
	{"post_bind4", ciliumebpf.AttachCGroupInet4PostBind}, {"post_bind6", ciliumebpf.AttachCGroupInet6PostBind},
}

// Cgroups lists the programs on a cgroup2 directory and on those directly below it. Before Linux
// 6.6 the request needs CAP_NET_ADMIN and CAP_BPF.
func Cgroups(root string) (list []Program, err error) {
	dirs := []string{root}
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, fmt.Errorf("list cgroups: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() {
			dirs = append(dirs, filepath.Join(root, e.Name()))
		}
	}
	for _, dir := range dirs {
		some, err := cgroup(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return list, fmt.Errorf("list programs of cgroup %s: %w", dir, err)
		}
		list = append(list, some...)
	}
	return list, nil
}

func cgroup(dir string) (list []Program, err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return On(f)
}

// On lists the programs on one cgroup2 directory, in the order in which they run.
func On(dir *os.File) (list []Program, err error) {
	for _, h := range cgroupHooks {
		ids, err := query(int(dir.Fd()), h.at)
		if err != nil {
			return list, err
		}
		for _, id := range ids {
			list = append(list, Program{Name: nameOf(id), ID: uint32(id), Hook: h.name, Cgroup: dir.Name()})
		}
	}
	return list, nil
}

// Devices lists the programs on these devices of the network namespace of the calling thread.
func Devices(links []netlink.Link) (list []Program, err error) {
	for _, l := range links {
		a := l.Attrs()
		add := func(id ciliumebpf.ProgramID, hook string) {
			list = append(list, Program{Name: nameOf(id), ID: uint32(id), Hook: hook, Device: a.Name})
		}
		if a.Xdp != nil && a.Xdp.Attached {
			add(ciliumebpf.ProgramID(a.Xdp.ProgId), "xdp")
		}
		for _, d := range []struct {
			name   string
			tcx    ciliumebpf.AttachType
			clsact uint32
		}{
			{"ingress", ciliumebpf.AttachTCXIngress, netlink.HANDLE_MIN_INGRESS}, {"egress", ciliumebpf.AttachTCXEgress, netlink.HANDLE_MIN_EGRESS},
		} {
			ids, err := query(a.Index, d.tcx)
			if err != nil {
				return list, fmt.Errorf("list programs of device %s: %w", a.Name, err)
			}
			for _, id := range ids {
				add(id, "tcx "+d.name)
			}
			// A device without such a qdisc has no filters, which older kernels report as an error.
			filters, _ := netlink.FilterList(l, d.clsact)
			for _, f := range filters {
				if bpf, ok := f.(*netlink.BpfFilter); ok {
					add(ciliumebpf.ProgramID(bpf.Id), "clsact "+d.name)
				}
			}
		}
	}
	return list, nil
}

func query(target int, at ciliumebpf.AttachType) (ids []ciliumebpf.ProgramID, err error) {
	result, err := link.QueryPrograms(link.QueryOptions{Target: target, Attach: at})
	switch {
	case errors.Is(err, unix.EPERM):
		return nil, err
	case errors.Is(err, unix.EINVAL), errors.Is(err, link.ErrNotSupported):
		// The library takes a missing privilege for a missing feature.
		if _, err := ciliumebpf.ProgramGetNextID(0); errors.Is(err, unix.EPERM) {
			return nil, err
		}
		return nil, nil // a kernel without this hook
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV):
		return nil, nil // nothing is attached, or the device is gone
	case err != nil:
		return nil, err
	}
	for _, p := range result.Programs {
		ids = append(ids, p.ID)
	}
	return ids, nil
}

func nameOf(id ciliumebpf.ProgramID) string {
	program, err := ciliumebpf.NewProgramFromID(id)
	if err != nil {
		return ""
	}
	defer program.Close()
	info, err := program.Info()
	if err != nil {
		return ""
	}
	return info.Name
}
