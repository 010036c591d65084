// SPDX-License-Identifier: Apache-2.0

//go:build linux

package container

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// AppArmorProfile is what runtimes confine containers with that are not privileged, on nodes with
// AppArmor: LoadAppArmorProfile loads one with the rules of containerd's cri-containerd.apparmor.d.
const AppArmorProfile = "tandem-test-container"

// appArmorRules allow what capabilities allow, except to change settings of the kernel, to mount, and to look into
// processes that are not confined like this.
const appArmorRules = `abi <abi/3.0>,
include <tunables/global>
profile ` + AppArmorProfile + ` flags=(attach_disconnected, mediate_deleted) {
  include <abstractions/base>
  network,
  capability,
  file,
  umount,
  signal (receive) peer=unconfined,
  signal (send, receive) peer=` + AppArmorProfile + `,
  ptrace (trace, tracedby, read, readby) peer=` + AppArmorProfile + `,
  deny mount,
  deny @{PROC}/* w,
  deny @{PROC}/{[^1-9],[^1-9][^0-9],[^1-9s][^0-9y][^0-9s],[^1-9][^0-9][^0-9][^0-9]*}/** w,
  deny @{PROC}/sys/[^k]** w,
  deny @{PROC}/sys/kernel/{?,??,[^s][^h][^m]**} w,
  deny @{PROC}/{sysrq-trigger,kcore,mem,kmem} rwklx,
  deny /sys/[^f]*/** wklx,
  deny /sys/f[^s]*/** wklx,
  deny /sys/fs/[^c]*/** wklx,
  deny /sys/fs/c[^g]*/** wklx,
  deny /sys/fs/cg[^r]*/** wklx,
  deny /sys/firmware/** rwklx,
  deny /sys/kernel/security/** rwklx,
}
`

// ErrNoAppArmor says that the kernel confines no process.
var ErrNoAppArmor = errors.New("the kernel has no AppArmor, or it is off")

// LoadAppArmorProfile loads the profile into the kernel, where it stays.
func LoadAppArmorProfile() error {
	if on, err := os.ReadFile("/sys/module/apparmor/parameters/enabled"); err != nil || strings.TrimSpace(string(on)) != "Y" {
		return ErrNoAppArmor
	}
	load := exec.Command("apparmor_parser", "--skip-cache", "--replace")
	load.Stdin = strings.NewReader(appArmorRules)
	if out, err := load.CombinedOutput(); err != nil {
		return fmt.Errorf("load an AppArmor profile: %w\n%s", err, out)
	}
	return nil
}

// confine has the next program of this thread confined by a profile.
func confine(profile string) error {
	if profile == "" {
		return nil
	}
	if err := os.WriteFile("/proc/thread-self/attr/apparmor/exec", []byte("exec "+profile), 0); err != nil {
		return fmt.Errorf("set the AppArmor profile: %w", err)
	}
	return nil
}
