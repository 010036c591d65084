// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/successor"
	"github.com/tandem-proxy/tandem/test/lab"
)

// BenchmarkConnect measures the CPU time of a connection: client, server, and the kernel's work
// for both. It compares connections to a VIP ("vip"), to the pod itself ("direct"), on a node whose
// programs leave new connections to another kube-proxy ("yielded"), on one where TCP clients see the
// endpoint's address as their peer ("endpoint-peer"), and on a node without any program ("bare"), in
// interleaved slices.
func BenchmarkConnect(b *testing.B) {
	for _, services := range []int{10, 50000} {
		for _, network := range []string{"tcp", "udp"} {
			b.Run(fmt.Sprintf("services=%d/%s", services, network), func(b *testing.B) {
				benchmarkConnect(b, services, network)
			})
		}
	}
}

func benchmarkConnect(b *testing.B, services int, network string) {
	l := lab.NewT(b)
	one, two, three, four, five := l.Node("node1"), l.Node("node2"), l.Node("node3"), l.Node("node4"), l.Node("node5")
	server, client := one.Pod("server"), one.Pod("client")
	bareServer, bareClient := two.Pod("bare-server"), two.Pod("bare-client")
	yieldedServer, yieldedClient := three.Pod("yielded-server"), three.Pod("yielded-client")
	fourthServer, fourthClient := four.Pod("fourth-server"), four.Pod("fourth-client")
	fifthServer, fifthClient := five.Pod("fifth-server"), five.Pod("fifth-client")
	ss, es := benchCluster(services, 1)
	for _, at := range []*lab.Node{one, three, four, five} {
		n := newNode(b, at, l, Options{Sizes: benchSizes, TCPPeerIsEndpoint: at == four, Signals: at == five})
		for i := range ss {
			n.OnServiceAdd(ss[i])
			n.OnEndpointSliceAdd(es[i])
		}
		n.OnServiceAdd(dualService())
		endpoint := server
		switch at {
		case four:
			endpoint = fourthServer
		case five:
			endpoint = fifthServer
		}
		n.OnEndpointSliceAdd(slicesOf("web", endpoint)[0])
		n.sync(b)
		if at == three {
			if err := n.tier.maps[successor.MapName].Put(uint32(0), lbmap.Successor{YieldedNs: 1}); err != nil {
				b.Fatal(err)
			}
		}
	}
	for _, p := range []*lab.Pod{server, bareServer, yieldedServer, fourthServer, fifthServer} {
		fd, err := listen(p, netip.AddrPortFrom(p.Addr4, targetPort), 0)
		if err != nil {
			b.Fatal(err)
		}
		defer unix.Shutdown(fd, unix.SHUT_RDWR)
	}

	ways := []struct {
		name string
		from *lab.Pod
		to   netip.AddrPort
	}{
		{"vip", client, netip.AddrPortFrom(vip4, 80)},
		{"direct", client, netip.AddrPortFrom(server.Addr4, targetPort)},
		{"bare", bareClient, netip.AddrPortFrom(bareServer.Addr4, targetPort)},
		{"yielded", yieldedClient, netip.AddrPortFrom(yieldedServer.Addr4, targetPort)},
		{"endpoint-peer", fourthClient, netip.AddrPortFrom(vip4, 80)},
		{"fourth-direct", fourthClient, netip.AddrPortFrom(fourthServer.Addr4, targetPort)},
		{"signals", fifthClient, netip.AddrPortFrom(vip4, 80)},
		{"fifth-direct", fifthClient, netip.AddrPortFrom(fifthServer.Addr4, targetPort)},
	}
	const slice = 500 // connections per measurement of CPU time
	costs := make([][]time.Duration, len(ways))
	for round := range b.N + 1 {
		for at := range ways {
			way := (at + round) % len(ways) // no way is always measured first
			took, err := connectCost(ways[way].from, network, ways[way].to, slice)
			if err != nil {
				b.Fatalf("%s: %v", ways[way].name, err)
			}
			if round > 0 { // the first one warms up
				costs[way] = append(costs[way], took/slice)
			}
		}
	}
	// The medians are of ratios within a round: its slices ran under the same load of the machine.
	ratio := func(way, to int) float64 {
		ratios := make([]float64, len(costs[way]))
		for i := range ratios {
			ratios[i] = float64(costs[way][i]) / float64(costs[to][i])
		}
		return median(ratios)
	}
	cost := func(way int) float64 {
		list := make([]float64, len(costs[way]))
		for i, c := range costs[way] {
			list[i] = float64(c.Nanoseconds()) / 1e3
		}
		return median(list)
	}
	b.ReportMetric(cost(0), "vip-µs")
	b.ReportMetric(cost(1), "direct-µs")
	b.ReportMetric(cost(2), "bare-µs")
	b.ReportMetric(cost(3), "yielded-µs")
	b.ReportMetric(ratio(0, 1), "vip/direct")
	b.ReportMetric(ratio(0, 2), "vip/bare")
	b.ReportMetric(ratio(3, 2), "yielded/bare")
	b.ReportMetric(cost(4), "endpoint-peer-µs")
	b.ReportMetric(ratio(4, 5), "endpoint-peer/direct")
	b.ReportMetric(cost(6), "signals-µs")
	b.ReportMetric(ratio(6, 7), "signals/direct")
	b.ReportMetric(0, "ns/op")
}

func median(list []float64) float64 {
	slices.Sort(list)
	return list[len(list)/2]
}

// connectCost opens and closes n connections, and returns the CPU time of this process, which
// has both ends.
func connectCost(from *lab.Pod, network string, to netip.AddrPort, n int) (took time.Duration, err error) {
	kind := unix.SOCK_STREAM
	if network == "udp" {
		kind = unix.SOCK_DGRAM
	}
	sa := &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	err = from.Do(func() error {
		before := cpuTime()
		for range n {
			fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			if err := unix.Connect(fd, sa); err != nil {
				unix.Close(fd)
				return err
			}
			if kind == unix.SOCK_STREAM {
				// Wait for the server, so that its work falls into the slice.
				var b [1]byte
				_, _ = unix.Read(fd, b[:])
			}
			unix.Close(fd)
		}
		took = cpuTime() - before
		return nil
	})
	return took, err
}

// cpuTime returns user plus system time of the process.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
