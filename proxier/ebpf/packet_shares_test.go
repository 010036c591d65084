// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/packet"
)

// shareWeights are those of the endpoints of weighted, by address.
var shareWeights = map[string]int{"10.244.9.1": 150, "10.244.9.2": 100, "10.244.9.3": 49, "10.244.9.4": 1}

// serveWeighted adds a Service with endpoints of different weights, one slice for each.
func (p *path) serveWeighted(t testing.TB, algorithm string, order ...string) netip.AddrPort {
	t.Helper()
	p.OnServiceAdd(writertest.Service("weighted", "10.96.0.77", func(s *v1.Service) {
		s.Annotations = map[string]string{proxier.AnnotationAlgorithm: algorithm}
	}))
	for _, address := range order {
		s := writertest.Slice("weighted-"+address, "weighted", address)
		s.Annotations = map[string]string{proxier.AnnotationWeight: fmt.Sprint(shareWeights[address])}
		p.OnEndpointSliceAdd(s)
	}
	if err := p.sync(); err != nil {
		t.Fatal(err)
	}
	return netip.MustParseAddrPort("10.96.0.77:80")
}

// pickedClient is 198.51.100.1 and on, from different ports.
func pickedClient(i int) netip.AddrPort {
	var client [4]byte
	binary.BigEndian.PutUint32(client[:], 0xc6336401+uint32(i)*0x9e3779b1>>12)
	return netip.AddrPortFrom(netip.AddrFrom4(client), uint16(1024+i*7919%60000))
}

// picks sends the first packets of connections of many clients, and returns the backends that they were led to.
func (p *path) picks(t testing.TB, to netip.AddrPort, n int) (list []netip.Addr) {
	t.Helper()
	err := p.at.Do(func() error {
		for i := range n {
			got, err := p.run(in, p.frame(tcp(pickedClient(i), to, packet.SYN)))
			if err != nil {
				return err
			}
			list = append(list, packet.Parse(got.Frame).Destination().Addr())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// TestPacketShares: backends get their share of new connections, within one per cent.
func TestPacketShares(t *testing.T) {
	for _, algorithm := range []string{"random", "maglev"} {
		t.Run(algorithm, func(t *testing.T) {
			p := newPath(t, Options{})
			const n = 200_000
			to := p.serveWeighted(t, algorithm, "10.244.9.1", "10.244.9.2", "10.244.9.3", "10.244.9.4")
			counts := map[netip.Addr]int{}
			for _, b := range p.picks(t, to, n) {
				counts[b]++
			}
			for address, weight := range shareWeights {
				got, want := float64(counts[netip.MustParseAddr(address)])/float64(n), float64(weight)/300
				if math.Abs(got-want) > 0.01 {
					t.Errorf("%s has a share of %.4f, want %.4f", address, got, want)
				}
			}
			t.Logf("%v", counts)
		})
	}
}

// TestPacketMaglevOfNodes: two nodes that learn of endpoints in another order pick the same for each connection, and what
// explanations say.
func TestPacketMaglevOfNodes(t *testing.T) {
	one, two := newPath(t, Options{}), newPath(t, Options{})
	to := one.serveWeighted(t, "maglev", "10.244.9.1", "10.244.9.2", "10.244.9.3", "10.244.9.4")
	two.serveWeighted(t, "maglev", "10.244.9.3", "10.244.9.1")
	two.serveWeighted(t, "maglev", "10.244.9.4", "10.244.9.2")
	const n = 2000
	first, second := one.picks(t, to, n), two.picks(t, to, n)
	for i := range first {
		if first[i] != second[i] {
			t.Fatalf("connection %d goes to %s and to %s", i, first[i], second[i])
		}
		e := one.Table().Explain(proxier.Flow{Source: pickedClient(i), Destination: to, Protocol: proxier.TCP})
		if says := e.Decision.Pick(e.Route.Set, e.Flow.Source, e.Flow.Destination); says.Backend.Addr.Addr() != first[i] || says.ByClient {
			t.Fatalf("connection %d goes to %s, the explanation is %+v", i, first[i], says)
		}
	}
}
