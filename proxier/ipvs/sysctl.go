// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/sysctl"
)

// setting is one of the kernel's, below /proc/sys.
type setting struct{ name, value, why string }

// settings returns the kernel settings that virtual servers need.
func (o *Options) settings(kernel string) []setting {
	list := []setting{
		{"net/ipv4/vs/conntrack", "1", "connections are not masqueraded"},
		{"net/ipv4/vs/expire_nodest_conn", "1", "connections go on to destinations that are gone"},
		{"net/ipv4/vs/expire_quiescent_template", "1", "clients with affinity stay with destinations that go"},
		{"net/ipv4/ip_forward", "1", "packets are not forwarded"},
		// A client's port that is used again is a new connection. Before Linux 5.9 it had
		// to wait for a second, and going on with the old one is less bad.
		{"net/ipv4/vs/conn_reuse_mode", "1", "ports that are used again lead to destinations that are gone"},
	}
	if reuseWaits(kernel) {
		list[len(list)-1].value = "0"
	}
	if o.StrictARP {
		const why = "this node answers ARP for addresses of Services"
		list = append(list, setting{"net/ipv4/conf/all/arp_ignore", "1", why}, setting{"net/ipv4/conf/all/arp_announce", "2", why})
	}
	return list
}

func reuseWaits(kernel string) bool {
	var major, minor int
	_, err := fmt.Sscanf(kernel, "%d.%d", &major, &minor)
	return err == nil && (major < 5 || major == 5 && minor < 9)
}

// configure changes the settings in the network namespace of the calling thread. If /proc/sys is
// read-only, that always fails: it logs each failure once, and syncs continue.
func (s *kernelSystem) configure(ctx context.Context) {
	for _, x := range s.opts.settings(release()) {
		if _, err := sysctl.Root("/").Ensure("proc/sys/"+x.name, x.value); err != nil && !s.told[x.name] {
			s.told[x.name] = true
			klog.FromContext(ctx).Error(err, "Cannot set a sysctl that IPVS needs", "setting", x.name, "want", x.value, "otherwise", x.why)
		}
	}
}

// Configure changes the settings of the kernel that virtual servers need, in the network
// namespace of the calling thread, for a process that will not have the privileges to.
func Configure(opts Options) error {
	servers, err := openServers() // which loads the module that has most of them
	if err != nil {
		return err
	}
	defer servers.Close()
	var errs []error
	for _, x := range opts.settings(release()) {
		if _, err := sysctl.Root("/").Ensure("proc/sys/"+x.name, x.value); err != nil {
			errs = append(errs, fmt.Errorf("%w; otherwise %s", err, x.why))
		}
	}
	return errors.Join(errs...)
}

// Changes returns the settings that Configure would change, and changes none.
func Changes(opts Options) (list []sysctl.Change, err error) {
	var errs []error
	for _, x := range opts.settings(release()) {
		changes, err := sysctl.Root("/").Compare("proc/sys/"+x.name, x.value)
		list, errs = append(list, changes...), append(errs, err)
	}
	return list, errors.Join(errs...)
}

// release is that of the kernel.
func release() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}
