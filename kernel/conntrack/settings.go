// SPDX-License-Identifier: Apache-2.0

//go:build linux

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"runtime"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/sysctl"
)

// Where the kernel has its settings.
const (
	settingsDir = "proc/sys/net/netfilter/"
	limitName   = settingsDir + "nf_conntrack_max"
	bucketsName = "sys/module/nf_conntrack/parameters/hashsize"
	onlineCPUs  = "sys/devices/system/cpu/online"
)

// mostFlows is upstream's bound for what it works out: a flow takes 320 bytes, and a
// table of more than that is somebody's decision.
const mostFlows = 1 << 20

// Settings are what a configuration says of the kernel's conntrack. Zero leaves a
// setting as it is.
type Settings struct {
	// MaxPerCPU times the CPUs, but at least Min, is how many flows there can be.
	MaxPerCPU, Min int
	// TCPEstablished and the others are how long flows are remembered.
	TCPEstablished, TCPCloseWait, UDP, UDPStream time.Duration
	// TCPBeLiberal takes packets outside of a connection's window for valid.
	TCPBeLiberal bool
}

// limit is how many flows there can be, on a node with so many CPUs.
func (s *Settings) limit(cpus int) int {
	if s.MaxPerCPU <= 0 {
		return 0
	}
	return max(min(s.MaxPerCPU*cpus, mostFlows), s.Min)
}

// Ready has the kernel load its conntrack, which may be a module that comes with the
// first rule that needs it: it has no settings before.
func Ready(ctx context.Context, root sysctl.Root) {
	if _, err := root.Get(limitName); !errors.Is(err, fs.ErrNotExist) {
		return
	}
	for range (Kernel{}).Flows(ctx, inet.IPv4) {
		break // it is asked for them; there are none, or an error that Apply will have as well
	}
}

// Apply changes the kernel's settings, as far as they are others, in the network
// namespace of the calling thread. Of what could not be changed, skipped is what
// upstream passes over or what belongs to the first network namespace alone.
func (s *Settings) Apply(ctx context.Context, root sysctl.Root) (skipped []error, err error) {
	logger := klog.FromContext(ctx)
	set := func(name, value string) error {
		changed, err := root.Ensure(name, value)
		if changed {
			logger.Info("Changed a setting of the kernel", "setting", name, "value", value)
		}
		return err
	}
	var errs []error
	if limit := s.limit(cpus(root)); limit > 0 {
		switch is, err := number(root, limitName); {
		case err == nil && is != limit && root.Foreign(limitName):
			if is < limit {
				skipped = append(skipped, fmt.Errorf("%s is %d, and should be %d: it can be changed in the first network namespace alone", limitName, is, limit))
			}
		default:
			if err := set(limitName, strconv.Itoa(limit)); err != nil {
				errs = append(errs, err)
				break
			}
			// Buckets of four flows on average, as upstream has them. /sys is read-only in
			// containers that are not privileged.
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
		{"nf_conntrack_tcp_timeout_established", s.TCPEstablished}, {"nf_conntrack_tcp_timeout_close_wait", s.TCPCloseWait},
		{"nf_conntrack_udp_timeout", s.UDP}, {"nf_conntrack_udp_timeout_stream", s.UDPStream},
	} {
		if t.is > 0 {
			// Not 0, which would have flows forgotten at once.
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

// cpus are those of the node, not those that this process may run on.
func cpus(root sysctl.Root) (n int) {
	text, err := root.Get(onlineCPUs) // as 0-3,6
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
