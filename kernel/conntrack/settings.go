// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"runtime"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/sysctl"
)

// Paths of the settings.
const (
	settingsDir     = "proc/sys/net/netfilter/"
	establishedName = "nf_conntrack_tcp_timeout_established" // in settingsDir
	limitName       = settingsDir + "nf_conntrack_max"
	countName       = settingsDir + "nf_conntrack_count"
	bucketsName     = "sys/module/nf_conntrack/parameters/hashsize"
	onlineCPUs      = "sys/devices/system/cpu/online"
)

// mostFlows is upstream's upper bound for a computed limit. An entry takes 320 bytes, so
// a larger table must be configured explicitly.
const mostFlows = 1 << 20

// Settings are the configured conntrack sysctls. A zero value leaves a setting
// unchanged.
type Settings struct {
	// The table holds MaxPerCPU entries for each CPU, but at least Min.
	MaxPerCPU, Min int
	// TCPEstablished and the others are timeouts of entries.
	TCPEstablished, TCPCloseWait, UDP, UDPStream time.Duration
	// TCPBeLiberal accepts packets outside the TCP window as valid.
	TCPBeLiberal bool
}

// limit returns the size of the table for a number of CPUs, or 0 to leave it unchanged.
func (s *Settings) limit(cpus int) int {
	if s.MaxPerCPU <= 0 {
		return 0
	}
	return max(min(s.MaxPerCPU*cpus, mostFlows), s.Min)
}

// defaultLimit is the kernel's own limit on machines with more than a GiB of memory.
const defaultLimit = 262144

// Limit returns the size of the table with these settings.
func (s *Settings) Limit(root sysctl.Root) int {
	if limit := s.limit(cpus(root)); limit > 0 {
		return limit
	}
	if limit, err := number(root, limitName); err == nil && limit > 0 {
		return limit
	}
	return defaultLimit // conntrack is not loaded yet
}

// Room returns how many entries the table of the calling thread's network namespace takes until it is half full.
func Room(root sysctl.Root) (int, error) {
	limit, err := number(root, limitName)
	if err != nil {
		return 0, err
	}
	if limit == 0 { // no limit
		return math.MaxInt, nil
	}
	used, err := number(root, countName)
	return max(0, limit/2-used), err
}

// PicksUpEstablished reports whether conntrack picks up TCP connections whose handshake it has not seen, in the network namespace of
// the calling thread (net.netfilter.nf_conntrack_tcp_loose, on by default). Otherwise their packets are in state INVALID.
func PicksUpEstablished(root sysctl.Root) bool {
	loose, err := number(root, settingsDir+"nf_conntrack_tcp_loose")
	return err != nil || loose != 0
}

// Ready makes the kernel load its conntrack module, if it is not loaded yet. The settings
// do not exist before that.
func Ready(ctx context.Context, root sysctl.Root) {
	if _, err := root.Get(limitName); !errors.Is(err, fs.ErrNotExist) {
		return
	}
	for range (Kernel{}).Flows(ctx, inet.IPv4) {
		break // the request loads the module; Apply reports an error, if any
	}
}

// Apply changes the settings that differ, in the network namespace of the calling thread.
// Settings that could not be changed are in skipped if upstream ignores that failure too,
// or if only the initial network namespace can change them. Others are in err.
func (s *Settings) Apply(ctx context.Context, root sysctl.Root) (skipped []error, err error) {
	logger := klog.FromContext(ctx)
	return s.each(root, func(name, value string) error {
		changed, err := root.Ensure(name, value)
		if changed {
			logger.Info("Changed sysctl", "setting", name, "value", value)
		}
		return err
	})
}

// Changes returns what Apply would change, and changes nothing. The error is about settings that
// Apply could not change, or that cannot be read.
func (s *Settings) Changes(root sysctl.Root) (list []sysctl.Change, err error) {
	skipped, err := s.each(root, func(name, value string) error {
		changes, err := root.Compare(name, value)
		list = append(list, changes...)
		return err
	})
	return list, errors.Join(append(skipped, err)...)
}

// each calls set for all settings and values.
func (s *Settings) each(root sysctl.Root, set func(name, value string) error) (skipped []error, err error) {
	var errs []error
	if limit := s.limit(cpus(root)); limit > 0 {
		switch is, err := number(root, limitName); {
		case err == nil && is != limit && root.Foreign(limitName):
			if is < limit {
				skipped = append(skipped, fmt.Errorf("%s is %d, want %d: only the initial network namespace can change it", limitName, is, limit))
			}
		default:
			if err := set(limitName, strconv.Itoa(limit)); err != nil {
				errs = append(errs, err)
				break
			}
			// Four entries per bucket on average, as in upstream. /sys is read-only in
			// unprivileged containers.
			if has, err := number(root, bucketsName); err != nil || has < limit/4 {
				if err := set(bucketsName, strconv.Itoa(limit/4)); err != nil {
					skipped = append(skipped, err)
				}
			}
		}
	}
	for _, t := range []struct {
		name string
		is   time.Duration
	}{
		{establishedName, s.TCPEstablished}, {"nf_conntrack_tcp_timeout_close_wait", s.TCPCloseWait},
		{"nf_conntrack_udp_timeout", s.UDP}, {"nf_conntrack_udp_timeout_stream", s.UDPStream},
	} {
		if t.is > 0 {
			// Not 0, which would expire entries immediately.
			errs = append(errs, set(settingsDir+t.name, strconv.Itoa(max(1, int(t.is/time.Second)))))
		}
	}
	if s.TCPBeLiberal {
		errs = append(errs, set(settingsDir+"nf_conntrack_tcp_be_liberal", "1"))
	}
	return skipped, errors.Join(errs...)
}

func number(root sysctl.Root, name string) (int, error) {
	text, err := root.Get(name)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(text)
}

// cpus returns the number of online CPUs of the node, which may be more than this process
// may use.
func cpus(root sysctl.Root) (n int) {
	text, err := root.Get(onlineCPUs) // for example 0-3,6
	if err != nil {
		return runtime.NumCPU()
	}
	for part := range strings.SplitSeq(text, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, err1 := strconv.Atoi(first)
		to, err2 := strconv.Atoi(last)
		if err1 != nil || err2 != nil || to < from {
			return runtime.NumCPU()
		}
		n += to - from + 1
	}
	return n
}
