// SPDX-License-Identifier: Apache-2.0

package app

import (
	"os"
	"path/filepath"
	"strconv"

	"github.com/tandem-proxy/tandem/proxier"
)

// ownProc is the proc file system that knows this process. --ebpf-proc-root
// can be another's, in which processes of the host are found.
const ownProc = "/proc"

// families are those this host can speak. The file is there only with IPv6.
func families() []proxier.Family {
	all := []proxier.Family{proxier.IPv4}
	if _, err := os.Stat(filepath.Join(ownProc, "self/net/if_inet6")); err == nil {
		all = append(all, proxier.IPv6)
	}
	return all
}

// setOOMScore tells the kernel how willingly this process dies for memory.
func setOOMScore(score int32) error {
	return os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(int(score))), 0)
}
