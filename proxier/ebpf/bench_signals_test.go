// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"net/netip"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/test/lab"
)

// BenchmarkSignals measures the time of the program for golden signals per TCP connection of a pod to a ClusterIP, as the kernel
// counts it (BPF_ENABLE_STATS), and the CPU time of such a connection with both its ends. The difference that the program
// makes to the latter is below the noise. Slices of both kinds take turns, as the kernel's counting costs time itself. An
// empty program beside it shows what the counting adds to each run.
func BenchmarkSignals(b *testing.B) {
	l := lab.NewT(b)
	one := l.Node("node1")
	server, client := one.Pod("server"), one.Pod("client")
	n := newNode(b, one, l, Options{Sizes: benchSizes, Signals: true})
	n.OnServiceAdd(dualService())
	n.OnEndpointSliceAdd(slicesOf("web", server)[0])
	n.sync(b)
	fd, err := listen(server, netip.AddrPortFrom(server.Addr4, targetPort), 0)
	if err != nil {
		b.Fatal(err)
	}
	defer unix.Shutdown(fd, unix.SHUT_RDWR)
	empty, err := ciliumebpf.NewProgram(&ciliumebpf.ProgramSpec{
		Name: "empty", Type: ciliumebpf.SockOps, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	if err != nil {
		b.Fatal(err)
	}
	defer empty.Close()
	beside := link.RawAttachProgramOptions{Target: int(n.tier.cgroup.Fd()), Program: empty, Attach: ciliumebpf.AttachCGroupSockOps, Flags: unix.BPF_F_ALLOW_MULTI}
	measured := n.tier.hooks.Programs[datapath.SignalHook]

	const slice = 500 // connections
	to := netip.AddrPortFrom(vip4, 80)
	var whole, gross, net, runs []float64
	for round := range b.N + 1 {
		took, err := connectCost(client, "tcp", to, slice)
		if err != nil {
			b.Fatal(err)
		}
		if err := link.RawAttachProgram(beside); err != nil {
			b.Fatal(err)
		}
		signal, counting, err := countedRuns(measured, empty, func() error {
			_, err := connectCost(client, "tcp", to, slice)
			return err
		})
		if err := errors.Join(err, link.RawDetachProgram(link.RawDetachProgramOptions{Target: beside.Target, Program: empty, Attach: beside.Attach})); err != nil {
			b.Fatal(err)
		}
		if round == 0 { // it warms up
			continue
		}
		if signal.RunCount == 0 || counting.RunCount == 0 {
			b.Fatalf("the program ran %d times, and the empty one %d times", signal.RunCount, counting.RunCount)
		}
		whole = append(whole, float64(took.Nanoseconds())/slice)
		gross = append(gross, float64(signal.Runtime.Nanoseconds())/slice)
		empty := float64(counting.Runtime.Nanoseconds()) / float64(counting.RunCount) * float64(signal.RunCount)
		net = append(net, (float64(signal.Runtime.Nanoseconds())-empty)/slice)
		runs = append(runs, float64(signal.RunCount)/slice)
	}
	connect := median(whole)
	b.ReportMetric(connect, "ns/connect")
	b.ReportMetric(median(runs), "runs/connect")
	b.ReportMetric(median(gross), "ns-counted")
	b.ReportMetric(median(net), "ns-signals")
	b.ReportMetric(100*median(net)/connect, "%-of-connect")
	b.ReportMetric(0, "ns/op")
}

// countedRuns runs fn, and returns what the kernel counted of two programs meanwhile.
func countedRuns(one, two *ciliumebpf.Program, fn func() error) (a, b ciliumebpf.ProgramStats, err error) {
	counting, err := ciliumebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		return a, b, err
	}
	since := func(before *[2]ciliumebpf.ProgramStats) error {
		for i, p := range []*ciliumebpf.Program{one, two} {
			s, err := p.Stats()
			if err != nil {
				return err
			}
			before[i] = ciliumebpf.ProgramStats{Runtime: s.Runtime - before[i].Runtime, RunCount: s.RunCount - before[i].RunCount}
		}
		return nil
	}
	var stats [2]ciliumebpf.ProgramStats
	err = since(&stats)
	if err == nil {
		err = fn()
	}
	err = errors.Join(err, since(&stats), counting.Close())
	return stats[0], stats[1], err
}
