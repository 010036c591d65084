// SPDX-License-Identifier: Apache-2.0

// Package removal takes the programs of a cgroup and of the devices of this network namespace out of the
// kernel, or has them accept no new connections, whichever process attached them.
package removal

import (
	"context"
	"errors"
	"io/fs"
	"os"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Cleanup removes what earlier processes left on a cgroup, and returns the
// names of the programs it detached. Foreign programs stay.
func Cleanup(ctx context.Context, cgroupRoot string) (removed []string, err error) {
	cgroup, err := datapath.OpenCgroup(cgroupRoot)
	if err != nil {
		return nil, err
	}
	defer cgroup.Close()
	// A process that still runs would attach its programs again.
	lock, err := datapath.Lock(ctx, cgroup)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	return Programs(cgroup, datapath.DetachDevices)
}

// ErrServing says that a running process serves Services by the programs.
var ErrServing = errors.New("a running kube-proxy serves Services by these programs")

// Detach is Cleanup that also works beside a process whose programs accept no new connections:
// one in another mode, which drains them.
func Detach(ctx context.Context, cgroupRoot string) (removed []string, err error) {
	cgroup, err := datapath.OpenCgroup(cgroupRoot)
	if err != nil {
		return nil, err
	}
	defer cgroup.Close()
	switch lock, err := datapath.Lock(ctx, cgroup); {
	case errors.Is(err, datapath.ErrBusy):
		if err := EachInUse(cgroup, isDrained); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	default:
		defer lock.Close()
	}
	return Programs(cgroup, datapath.DetachDevices)
}

// isDrained returns ErrServing for a program that has frontends.
func isDrained(program *ciliumebpf.Program) error {
	maps, err := lbmap.MapsOf(program)
	if err != nil {
		return err
	}
	defer maps.Close()
	if m := maps["tdm_frontend"]; m != nil {
		if key, err := m.NextKeyBytes(nil); err != nil || key != nil {
			return errors.Join(err, ErrServing)
		}
	}
	return nil
}

// Busy reports whether a process serves a cgroup, or drains its programs.
func Busy(cgroupRoot string) (bool, error) {
	cgroup, err := datapath.OpenCgroup(cgroupRoot)
	if err != nil {
		return false, err
	}
	defer cgroup.Close()
	return datapath.IsLocked(cgroup)
}

// Programs takes the programs of the proxy off all devices, by that function, and then off the
// cgroup. A later cleanup finds programs on devices by those on the cgroup. Where devices fail,
// the latter stay, without frontends.
func Programs(cgroup *os.File, devices func() (removed []string, err error)) (removed []string, err error) {
	found, err := datapath.FindAttached(cgroup)
	if err != nil {
		return nil, err
	}
	defer datapath.CloseAttached(found)
	if removed, err = devices(); err != nil {
		return removed, errors.Join(err, Frontends(cgroup))
	}
	var errs []error
	for _, a := range found {
		if err := datapath.Detach(cgroup, a); err != nil {
			errs = append(errs, err)
			continue
		}
		if info, err := a.Program.Info(); err == nil {
			removed = append(removed, info.Name)
		}
	}
	return removed, errors.Join(errs...)
}

// Attached reports whether programs of the proxy are attached to a cgroup. Without CAP_SYS_ADMIN
// it can only tell that there are no programs at all.
func Attached(cgroupRoot string) (bool, error) {
	cgroup, err := datapath.OpenCgroup(cgroupRoot)
	if err != nil {
		return false, err
	}
	defer cgroup.Close()
	found, err := datapath.FindAttached(cgroup)
	datapath.CloseAttached(found)
	if errors.Is(err, fs.ErrPermission) && datapath.IsBare(cgroup) {
		return false, nil
	}
	return len(found) > 0, err
}
