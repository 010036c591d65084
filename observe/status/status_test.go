// SPDX-License-Identifier: Apache-2.0

package status

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/proxier"
)

// One frontend that nothing serves for some clients counts, and so does a service port without room.
func TestShares(t *testing.T) {
	var all []proxier.PortChange
	add := func(name string, kinds ...proxier.Kind) {
		d := &proxier.Decision{}
		d.Name.Name = name
		for i, k := range kinds {
			d.Frontends = append(d.Frontends, proxier.Frontend{Addr: netip.AddrPortFrom(netip.MustParseAddr("10.96.0.10"), uint16(i)), Kind: k})
		}
		all = append(all, proxier.PortChange{New: d})
	}
	add("by programs", proxier.ClusterIP)
	add("by programs too", proxier.ClusterIP)
	add("by both", proxier.ClusterIP, proxier.NodePort)
	add("in part", proxier.ClusterIP, proxier.ExternalIP)
	add("no room", proxier.ClusterIP)
	add("no frontend")
	add("another Service has its address", proxier.ClusterIP)
	all[len(all)-1].New.Frontends[0].Conflict = &proxier.ServicePortName{}
	got := Shares(all, func(d *proxier.Decision) bool { return d.Name.Name == "no room" }, func(_ *proxier.Decision, f *proxier.Frontend, o proxier.Origin) string {
		switch {
		case f.Kind == proxier.NodePort && o == proxier.FromOutside:
			return "iptables"
		case f.Kind == proxier.ExternalIP && o == proxier.FromPod:
			return ""
		}
		return "ebpf"
	})
	want := []Share{{Datapaths: []string{}, Count: 2}, {Datapaths: []string{"ebpf"}, Count: 2}, {Datapaths: []string{"ebpf", "iptables"}, Count: 1}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestRecorder(t *testing.T) {
	var r Recorder
	var s Status
	r.Fill(&s)
	if d := cmp.Diff(Status{Problems: []Problem{}}, s); d != "" {
		t.Errorf("before anything happened (-want +got):\n%s", d)
	}
	at := time.Unix(1000, 0)
	r.Synced(proxier.SyncInfo{Start: at, End: at.Add(time.Second), Full: true})
	r.Synced(proxier.SyncInfo{Start: at.Add(2 * time.Second), End: at.Add(2500 * time.Millisecond), Err: errors.New("no luck")})
	r.Problem("Service", "AddressConflict")
	r.Problem("Node", "Unsupported")
	r.Problem("Node", "Unsupported")
	r.Fill(&s)
	success := at.Add(time.Second)
	want := Status{
		LastSync: &Sync{End: at.Add(2500 * time.Millisecond), Duration: 0.5, Error: "no luck"}, LastSuccess: &success,
		Problems: []Problem{{"Node", "Unsupported", 2}, {"Service", "AddressConflict", 1}},
	}
	if d := cmp.Diff(want, s); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}
