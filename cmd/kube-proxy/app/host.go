// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// ownProc is the proc file system that knows this process. --ebpf-proc-root
// can be another's, in which processes of the host are found.
const ownProc = "/proc"

// families are those this host can speak. The first file is there only with IPv6.
func families() []proxier.Family {
	all := []proxier.Family{proxier.IPv4}
	_, err := os.Stat(filepath.Join(ownProc, "self/net/if_inet6"))
	disabled, _ := os.ReadFile(filepath.Join(ownProc, "sys/net/ipv6/conf/all/disable_ipv6"))
	if err == nil && strings.TrimSpace(string(disabled)) != "1" {
		all = append(all, proxier.IPv6)
	}
	return all
}

// checkPrimary says what is wrong with a node whose primary family, which is that of its
// bind address, is not one of its host's. Without the other one it is a node of one family.
func checkPrimary(bindAddress string, families []proxier.Family) error {
	a, err := netip.ParseAddr(bindAddress)
	if err != nil || slices.Contains(families, proxier.FamilyOf(a)) {
		return err
	}
	return fmt.Errorf("bindAddress %s makes %s the primary address family of this node, but it is off on this host", a, proxier.FamilyOf(a))
}

// setOOMScore tells the kernel how willingly this process dies for memory.
func setOOMScore(score int32) error {
	return os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(int(score))), 0)
}
