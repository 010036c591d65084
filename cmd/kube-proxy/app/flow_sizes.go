// SPDX-License-Identifier: Apache-2.0

package app

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

const (
	// memoryShare is the share of the machine's memory that flows may take, as a divisor.
	memoryShare = 64
	// leastFlows is the least number of established TCP connections that is derived.
	leastFlows = 4096
)

// deriveFlowSizes sets those numbers of flows that the configuration leaves open: together as
// many as conntrack's limit, half of them for established TCP connections and a quarter each for
// UDP and for young flows, but no more than a share of memory, in bytes, has room for.
func deriveFlowSizes(s *lbmap.Sizes, conntrackLimit int, memory uint64) {
	tcp := max(flowtable.PowerOfTwo(uint32(conntrackLimit/2)), leastFlows)
	for tcp > leastFlows && flowtable.Memory(lbmap.Sizes{TCPFlows: tcp, UDPFlows: tcp / 2, YoungFlows: tcp / 2}) > memory/memoryShare {
		tcp /= 2
	}
	for _, size := range []struct {
		at   *uint32
		most uint32
	}{{&s.TCPFlows, tcp}, {&s.UDPFlows, tcp / 2}, {&s.YoungFlows, tcp / 2}} {
		if *size.at == 0 {
			*size.at = size.most
		}
	}
}

// machineMemory is how much memory this process may use, in bytes: that of the machine, or the limit
// of its cgroup, to which the kernel charges BPF maps since Linux 5.11.
func machineMemory() uint64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0 // it cannot fail; the least sizes then
	}
	memory := uint64(info.Totalram) * uint64(info.Unit)
	// In a container this is its own cgroup.
	text, err := os.ReadFile("/sys/fs/cgroup/memory.max")
	if err != nil {
		return memory // cgroup v1, or none
	}
	limit, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return memory // "max"
	}
	return min(memory, limit)
}

// conntrackLimit is the size of conntrack's table on this machine.
func conntrackLimit(settings *conntrack.Settings) int { return settings.Limit(kernelSettings) }
