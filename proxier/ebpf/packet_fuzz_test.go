// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"testing"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/packet"
)

// FuzzPacket sends an arbitrary frame while there are a few flows, and compares the result and the
// flows with the model. Its seeds are the frames of the scenes.
func FuzzPacket(f *testing.F) {
	p := &player{path: newPath(f, Options{NodePortRange: onePort}), seen: map[string]uint64{}}
	p.endsCluster(f)
	var begin []passing
	for family := range proxier.Families {
		e := endsOf(family)
		for _, q := range []packet.Packet{
			tcp(e.client, e.local, packet.SYN), udp(e.client, e.local), tcp(e.client, e.remote, packet.SYN), udp(e.client, e.remote),
		} {
			begin = append(begin, passing{in, p.frame(q)})
		}
		for _, table := range sceneTables {
			for _, s := range table.scenes(p.path, e) {
				for _, step := range s.steps {
					if step.happens == nil {
						f.Add(step.hook == out, p.frame(step.send))
					}
				}
			}
		}
	}
	f.Fuzz(func(t *testing.T, leaves bool, frame []byte) {
		if len(frame) < 14 || len(frame) > largestOut-1000 || !isRunnable(frame) {
			return // the kernel refuses to run programs on such a frame
		}
		if err := p.reset(); err != nil {
			t.Fatal(err)
		}
		err := p.at.Do(func() error {
			for _, b := range append(begin, passing{map[bool]datapath.Hook{true: out}[leaves], frame}) {
				if err := p.pass(b); err != nil {
					return err
				}
			}
			return p.compare()
		})
		if err != nil {
			t.Fatal(err)
		}
	})
}
