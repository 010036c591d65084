// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"maps"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/successor"
	model "github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/packet"
)

// drainingPrograms loads draining programs with the maps of a path, except that the maps of
// frontends and prefixes are empty.
func drainingPrograms(t *testing.T, p *path) *datapath.PacketPrograms {
	t.Helper()
	spec, err := lbmap.PacketSpec()
	if err != nil {
		t.Fatal(err)
	}
	all := maps.Clone(p.maps)
	for _, name := range []string{"tdm_frontend", "tdm_node"} {
		m, err := ciliumebpf.NewMap(spec.Maps[name])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { m.Close() })
		all[name] = m
	}
	opts := deviceOptionsOf(t, p.tier)
	opts.Draining = true
	d := datapath.NewDevices(all, opts)
	t.Cleanup(d.Close)
	programs, err := d.Programs(t.Context(), datapath.Variant{})
	if err != nil {
		t.Fatal(err)
	}
	return programs
}

// TestPacketDraining: while draining, and while new connections are left to another kube-proxy, every
// SYN belongs to a new connection, even with the ports of an existing flow. A UDP flow expires
// unless its backend replies.
func TestPacketDraining(t *testing.T) {
	p := newPath(t, Options{NodePortRange: onePort})
	p.endsCluster(t)
	serving, draining := p.programs, drainingPrograms(t, p)
	p.playDraining(t, "draining",
		func(p *path) error { p.programs = draining; return nil },
		func(p *path) error { p.programs = serving; return nil }, false)
	yield := func(since uint64) func(p *path) error {
		return func(p *path) error {
			p.programs = serving
			return p.maps[successor.MapName].Put(uint32(0), lbmap.Successor{YieldedNs: since})
		}
	}
	p.playDraining(t, "yielded", yield(1), yield(0), true)
}

// playDraining plays what holds in both cases. begin and end are those of the case; alone says
// that no process ends silent flows.
func (p *path) playDraining(t *testing.T, name string, begin, end func(*path) error, alone bool) {
	const SYN, ACK = packet.SYN, packet.ACK
	drain := step{happens: func(p *path) error { p.model.Drain(); return begin(p) }}
	// silence makes flows look idle for this time.
	const age = 10
	silence := step{happens: func(p *path) error {
		for i := range p.flows {
			p.age(uint32(i), age)
		}
		return nil
	}}
	seen := func(recently bool) step {
		return step{happens: func(p *path) error {
			for i := range p.flows {
				f := &p.flows[i]
				if lbmap.FlowStage(f.Life) < lbmap.FlowYoung {
					continue
				}
				if ago := flowtable.MonotonicSeconds() - f.Seen; (ago < age) != recently {
					return fmt.Errorf("seen %d s ago", ago)
				}
			}
			return nil
		}}
	}
	// silent makes flows look idle for so many seconds, which end UDP ones if no process does.
	silent := func(seconds uint32, ends bool) step {
		return step{happens: func(p *path) error {
			for i := range p.flows {
				p.age(uint32(i), seconds)
			}
			if alone && ends {
				p.model.Expire(flowtable.MonotonicSeconds()+1, func(protocol uint8, _ model.State) time.Duration {
					if protocol == unix.IPPROTO_UDP {
						return 0
					}
					return time.Hour
				})
			}
			return nil
		}}
	}
	serve := step{happens: func(p *path) error {
		// Ports that were taken for netfilter stay taken.
		if err := netlink.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
			return err
		}
		return end(p)
	}}
	p.play(t, func(p *path, e ends) []scene {
		request := func(flags packet.Flags) step {
			return step{in, tcp(e.client, e.local, flags), next, tcp(e.client, e.here, flags), "FORWARD_LOCAL", nil}
		}
		reply := func(flags packet.Flags) step {
			return step{out, tcp(e.here, e.client, flags), next, tcp(e.local, e.client, flags), "FORWARD_REPLY", nil}
		}
		asks := step{in, udp(e.client, e.remote), redirect, forwarded(udp(e.nat, e.there)), "FORWARD_REMOTE", nil}
		answers := step{in, udp(e.there, e.nat), redirect, forwarded(udp(e.remote, e.client)), "FORWARD_REPLY", nil}
		pass := func(send packet.Packet) step { return step{in, send, next, same, "", nil} }
		unansweredUDP := asks
		if alone {
			unansweredUDP = pass(udp(e.client, e.remote))
		}
		list := named(name, []scene{
			{
				name: "what is established goes on, until its client begins anew",
				steps: []step{
					serve, request(SYN), reply(SYN | ACK), request(ACK), drain, request(ACK), reply(ACK),
					pass(tcp(e.client, e.local, SYN)), pass(tcp(e.client, e.local, ACK)),
				},
				flows: []string{},
			},
			{
				name:  "what began before goes on",
				steps: []step{serve, request(SYN), drain, reply(SYN | ACK), request(ACK)},
			},
			{
				name:  "no new connection is served, and none is rejected",
				steps: []step{serve, drain, pass(tcp(e.client, e.local, SYN)), pass(udp(e.client, e.remote)), pass(tcp(e.client, e.unserved, SYN))},
				flows: []string{},
			},
			{
				name: "UDP lives as long as it is answered",
				steps: []step{
					serve, asks, answers, drain, silence, asks, seen(true), silence, asks, seen(false), answers, seen(true), silence, asks, seen(true),
				},
			},
			{
				name:  "UDP may be silent for a while",
				steps: []step{serve, asks, answers, drain, silent(110, false), asks, silent(25, false), asks, answers},
			},
			{
				name:  "UDP may not be silent for long",
				steps: []step{serve, asks, answers, drain, silent(130, true), unansweredUDP},
			},
			{
				name:  "TCP lives as long as there are packets",
				steps: []step{serve, request(SYN), reply(SYN | ACK), request(ACK), drain, silence, request(ACK), seen(true)},
			},
			{
				name:  "while serving, a question keeps UDP as well",
				steps: []step{serve, asks, silence, asks, seen(true)},
			},
			{
				name: "UDP that is not answered ends, TCP does not",
				steps: []step{
					serve, asks, answers, request(SYN), reply(SYN | ACK), request(ACK), drain, asks, silent(40, true), request(ACK), unansweredUDP,
				},
			},
		})
		if alone { // a process that drains removes these addresses from their map
			list = append(list, scene{
				name:  name + ": echo requests are left alone",
				steps: []step{serve, drain, pass(packet.NewEcho(e.client.Addr(), e.balancer.Addr(), 7, 1, []byte("hello")))},
			})
		}
		return list
	})
}

// named puts a name before those of scenes.
func named(name string, list []scene) []scene {
	for i := range list {
		list[i].name = name + ": " + list[i].name
	}
	return list
}
