// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// getInfo is IPT_SO_GET_INFO and IP6T_SO_GET_INFO of linux/netfilter_{ipv4,ipv6}.
const getInfo = 64

// tableInfo is struct ipt_getinfo, and struct ip6t_getinfo.
type tableInfo struct {
	name                  [32]byte
	hooks                 uint32
	hookEntry, underflows [5]uint32
	entries, size         uint32
}

// Sizes describes the tables of the legacy variant: their numbers of rules and chains, their
// sizes in bytes, and where their built-in chains begin and end. It costs one system call for
// each table, however many rules that has. A change that keeps all of these, such as another
// address in a rule, is not seen. For the nft variant, which has Generation, ok is false. It
// needs CAP_NET_RAW and CAP_NET_ADMIN.
func (t *Tools) Sizes(family inet.Family, tables ...string) (text string, ok bool, err error) {
	if t.variant != Legacy {
		return "", false, nil
	}
	domain, level := unix.AF_INET, unix.SOL_IP
	if family == inet.IPv6 {
		domain, level = unix.AF_INET6, unix.SOL_IPV6
	}
	fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return "", false, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	var b strings.Builder
	for _, name := range tables {
		info := tableInfo{}
		copy(info.name[:len(info.name)-1], name)
		length := uint32(unsafe.Sizeof(info))
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), getInfo, uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&length)), 0)
		switch {
		case errno == unix.ENOENT, errno == unix.ENOPROTOOPT:
			fmt.Fprintf(&b, "%s: none\n", name)
			continue
		case errno != 0:
			return "", false, fmt.Errorf("query the size of table %s: %w", name, errno)
		}
		fmt.Fprintf(&b, "%s: %d entries, %d bytes, hooks %v %v\n", name, info.entries, info.size, info.hookEntry, info.underflows)
	}
	return b.String(), true, nil
}
