// SPDX-License-Identifier: Apache-2.0

package staleudp_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/staleudp"
)

// Addresses in these tests: ClusterIPs 10.96.0.0/16 and fd00:10:96::/112, external
// ones 203.0.113.0/24, backends 10.244.0.0/16 and fd00:10:244::/48, clients
// 198.51.100.0/24 and 2001:db8::/32. This node is 172.18.0.1 and fd00:18::1, and
// has 172.18.1.1 as well, where it serves no NodePorts.

var (
	bg    = context.Background()
	rules = proxier.NodeRules{
		LocalAddrs:    addrs("172.18.0.1", "172.18.1.1", "fd00:18::1"),
		NodePortAddrs: addrs("172.18.0.1", "fd00:18::1"),
		Loopback:      [proxier.Families][]netip.Prefix{{netip.MustParsePrefix("127.0.0.1/32")}, nil},
		Unserved:      []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")},
	}
)

func addrs(list ...string) (out []netip.Addr) {
	for _, text := range list {
		out = append(out, netip.MustParseAddr(text))
	}
	return out
}

// table is a conntrack in memory.
type table struct {
	flows []conntrack.Flow
	// interruptions are how many dumps are still to be interrupted, and show half
	// of what there is; the errors are those of the next calls.
	interruptions        int
	listError, deleteErr error
	dumps                [proxier.Families]int
}

// makeTable makes entries of words: source, destination, and the backend of one that
// was translated; before them tcp, sctp or zone=1.
func makeTable(lines ...string) *table {
	t := &table{}
	for i, line := range lines {
		f := conntrack.Flow{Protocol: proxier.UDP, ID: uint32(i)}
		words := strings.Fields(line)
		for ; !strings.Contains(words[0], ":"); words = words[1:] {
			switch words[0] {
			case "tcp":
				f.Protocol = proxier.TCP
			case "sctp":
				f.Protocol = proxier.SCTP
			case "zone=1":
				f.Zone = 1
			default:
				panic(line)
			}
		}
		f.Source, f.Destination = netip.MustParseAddrPort(words[0]), netip.MustParseAddrPort(words[1])
		f.Replies = netip.MustParseAddrPort(words[len(words)-1])
		t.flows = append(t.flows, f)
	}
	return t
}

func (t *table) Flows(_ context.Context, family proxier.Family) iter.Seq2[conntrack.Flow, error] {
	return func(yield func(conntrack.Flow, error) bool) {
		t.dumps[family]++
		err := t.listError
		t.listError = nil
		n := len(t.flows)
		if err == nil && t.interruptions > 0 {
			t.interruptions--
			err, n = conntrack.ErrInterrupted, n/2
		}
		for _, f := range t.flows[:n] {
			if proxier.FamilyOf(f.Destination.Addr()) == family && !yield(f, nil) {
				return
			}
		}
		if err != nil {
			yield(conntrack.Flow{}, err)
		}
	}
}

func (t *table) Delete(_ context.Context, flows []conntrack.Flow) (deleted int, err error) {
	err, t.deleteErr = t.deleteErr, nil
	for _, f := range flows {
		if f.Zone != 0 || f.Protocol != proxier.UDP {
			panic("deletes " + f.String())
		}
		if i := slices.Index(t.flows, f); i >= 0 && err == nil {
			t.flows = slices.Delete(t.flows, i, i+1)
			deleted++
		}
	}
	return deleted, err
}

// left are the entries, by their numbers in makeTable.
func (t *table) left() (ids []uint32) {
	for _, f := range t.flows {
		ids = append(ids, f.ID)
	}
	return ids
}

// makeDecision reads words: a kind of frontend and its address, backend and its
// address, retained and that of a backend that gets no new clients, held and the
// address of a ClusterIP that another service port has.
func makeDecision(name string, protocol proxier.Protocol, text string) *proxier.Decision {
	d := &proxier.Decision{Name: proxier.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "ns", Name: name}, Protocol: protocol}}
	words := strings.Fields(text)
	for ; len(words) > 0; words = words[2:] {
		a := netip.MustParseAddrPort(words[1])
		f := proxier.Frontend{Addr: a}
		switch words[0] {
		case "backend":
			d.Backends = append(d.Backends, proxier.Backend{Addr: a, Members: proxier.InCluster})
			continue
		case "retained":
			d.Backends = append(d.Backends, proxier.Backend{Addr: a, Terminating: true})
			continue
		case "clusterip":
			f.Kind = proxier.ClusterIP
		case "external":
			f.Kind = proxier.ExternalIP
		case "nodeport":
			f.Kind = proxier.NodePort
		case "held":
			f.Kind, f.Conflict = proxier.ClusterIP, &proxier.ServicePortName{}
		default:
			panic(words[0])
		}
		d.Frontends = append(d.Frontends, f)
	}
	return d
}

func udp(name, text string) *proxier.Decision { return makeDecision(name, proxier.UDP, text) }

// full is an update that has these decisions and no others.
func full(decisions ...*proxier.Decision) *proxier.Update {
	u := &proxier.Update{Full: true, NodeRules: &rules}
	for _, d := range decisions {
		u.Changes = append(u.Changes, proxier.PortChange{New: d})
	}
	return u
}

func change(before, after *proxier.Decision) *proxier.Update {
	return &proxier.Update{Changes: []proxier.PortChange{{Old: before, New: after}}}
}

const (
	dns4 = "clusterip 10.96.0.10:53 backend 10.244.0.1:5353 backend 10.244.0.2:5353"
	all4 = "clusterip 10.96.0.10:53 external 203.0.113.1:53 nodeport 0.0.0.0:30053 backend 10.244.0.1:5353 backend 10.244.0.2:5353"
	all6 = " clusterip [fd00:10:96::a]:53 nodeport [::]:30053 backend [fd00:10:244::1]:5353"
)

func TestReconcile(t *testing.T) {
	for _, test := range []struct {
		name      string
		before    []string // decisions that were reconciled before the entries came
		after     []string
		exclusive bool
		keep      []string
		gone      []string
	}{
		{
			name:   "backend removed",
			before: []string{dns4},
			after:  []string{"clusterip 10.96.0.10:53 backend 10.244.0.1:5353"},
			keep:   []string{"198.51.100.1:4000 10.96.0.10:53 10.244.0.1:5353"},
			gone:   []string{"198.51.100.1:4001 10.96.0.10:53 10.244.0.2:5353"},
		},
		{
			name:   "backend with the frontend's own address",
			before: []string{"external 203.0.113.1:53"},
			after:  []string{"external 203.0.113.1:53 backend 10.244.0.1:53 backend 203.0.113.1:53"},
			keep: []string{
				"198.51.100.1:4000 203.0.113.1:53 203.0.113.1:53",
				"198.51.100.1:4001 203.0.113.1:53 10.244.0.1:53",
			},
			gone: []string{"198.51.100.1:4002 203.0.113.1:53 10.244.0.2:53"},
		},
		{
			name:   "backend with another port",
			before: []string{dns4},
			after:  []string{"clusterip 10.96.0.10:53 backend 10.244.0.1:53 backend 10.244.0.2:5353"},
			gone:   []string{"198.51.100.1:4000 10.96.0.10:53 10.244.0.1:5353"},
			keep:   []string{"198.51.100.1:4000 10.96.0.10:53 10.244.0.2:5353"},
		},
		{
			name:   "backend retained for clients that have it",
			before: []string{dns4},
			after:  []string{"clusterip 10.96.0.10:53 backend 10.244.0.1:5353 retained 10.244.0.2:5353"},
			keep:   []string{"198.51.100.1:4001 10.96.0.10:53 10.244.0.2:5353"},
		},
		{
			name:   "only what changes is a new one",
			before: []string{},
			after:  []string{all4 + all6},
			keep: []string{
				"198.51.100.1:4000 10.96.0.10:53 10.244.0.1:5353",
				"198.51.100.1:4000 203.0.113.1:53 10.244.0.2:5353",
				"198.51.100.1:4000 172.18.0.1:30053 10.244.0.1:5353",
				"127.0.0.1:4000 127.0.0.1:30053 10.244.0.1:5353",
				"[2001:db8::1]:4000 [fd00:10:96::a]:53 [fd00:10:244::1]:5353",
				"[2001:db8::1]:4000 [fd00:18::1]:30053 [fd00:10:244::1]:5353",
			},
		},
		{
			name:   "every kind of frontend",
			before: []string{all4 + all6},
			after:  []string{"clusterip 10.96.0.10:53 external 203.0.113.1:53 nodeport 0.0.0.0:30053 clusterip [fd00:10:96::a]:53 nodeport [::]:30053 backend 10.244.0.9:5353 backend [fd00:10:244::9]:5353"},
			gone: []string{
				"198.51.100.1:4000 10.96.0.10:53 10.244.0.1:5353",
				"198.51.100.1:4000 203.0.113.1:53 10.244.0.2:5353",
				"198.51.100.1:4000 172.18.0.1:30053 10.244.0.1:5353",
				"198.51.100.1:4000 172.18.1.1:30053 10.244.0.1:5353", // nodePortAddresses may have been others
				"127.0.0.1:4000 127.0.0.1:30053 10.244.0.1:5353",
				"[2001:db8::1]:4000 [fd00:10:96::a]:53 [fd00:10:244::1]:5353",
				"[2001:db8::1]:4000 [fd00:18::1]:30053 [fd00:10:244::1]:5353",
			},
		},
		{
			name:   "no backend left",
			before: []string{all4},
			after:  []string{"clusterip 10.96.0.10:53 external 203.0.113.1:53 nodeport 0.0.0.0:30053"},
			gone: []string{
				"198.51.100.1:4000 10.96.0.10:53 10.244.0.1:5353",
				"198.51.100.1:4000 203.0.113.1:53 10.244.0.2:5353",
				"198.51.100.1:4000 172.18.0.1:30053 10.244.0.1:5353",
			},
			keep: []string{"198.51.100.1:4001 10.96.0.10:53"},
		},
		{
			name:   "a first backend",
			before: []string{"clusterip 10.96.0.10:53 nodeport 0.0.0.0:30053 retained 10.244.0.1:5353"},
			after:  []string{all4},
			gone: []string{
				"198.51.100.1:4000 10.96.0.10:53",
				"198.51.100.1:4000 203.0.113.1:53",
				"198.51.100.1:4000 172.18.0.1:30053",
				"127.0.0.1:4000 127.0.0.1:30053",
			},
			keep: []string{
				"198.51.100.1:4000 172.18.1.1:30053", // no NodePorts there
				"127.0.0.1:4000 127.0.0.2:30053",
				"198.51.100.1:4001 10.96.0.10:53 10.244.0.1:5353",
			},
		},
		{
			name:   "a first one for new clients",
			before: []string{"clusterip 10.96.0.10:53 retained 10.244.0.2:5353"},
			after:  []string{"clusterip 10.96.0.10:53 backend 10.244.0.1:5353 retained 10.244.0.2:5353"},
			gone:   []string{"198.51.100.1:4000 10.96.0.10:53"},
			keep:   []string{"198.51.100.1:4001 10.96.0.10:53 10.244.0.2:5353"},
		},
		{
			name:   "none for new clients",
			before: []string{dns4},
			after:  []string{"clusterip 10.96.0.10:53 retained 10.244.0.2:5353"},
			gone:   []string{"198.51.100.1:4000 10.96.0.10:53 10.244.0.1:5353"},
			keep:   []string{"198.51.100.1:4001 10.96.0.10:53 10.244.0.2:5353", "198.51.100.1:4002 10.96.0.10:53"},
		},
		{
			name:   "an address of the node that was external, with the port of a NodePort",
			before: []string{"external 172.18.0.1:30053 backend 10.244.0.1:53", "nodeport 0.0.0.0:30053 backend 10.244.0.2:53"},
			after:  []string{"clusterip 10.96.0.10:53 backend 10.244.0.1:53", "nodeport 0.0.0.0:30053 backend 10.244.0.2:53"},
			gone:   []string{"198.51.100.1:4000 172.18.0.1:30053 10.244.0.1:53"},
			keep:   []string{"198.51.100.1:4001 172.18.0.1:30053 10.244.0.2:53"},
		},
		{
			name:   "a first backend of the other family",
			before: []string{"clusterip 10.96.0.10:53 clusterip [fd00:10:96::a]:53"},
			after:  []string{"clusterip 10.96.0.10:53 clusterip [fd00:10:96::a]:53 backend [fd00:10:244::1]:53"},
			gone:   []string{"[2001:db8::1]:4000 [fd00:10:96::a]:53"},
			keep:   []string{"198.51.100.1:4000 10.96.0.10:53"},
		},
		{
			name:   "Service deleted",
			before: []string{all4},
			after:  []string{},
			gone: []string{
				"198.51.100.1:4000 10.96.0.10:53 10.244.0.1:5353",
				"198.51.100.1:4000 203.0.113.1:53 10.244.0.2:5353",
				"198.51.100.1:4000 172.18.0.1:30053 10.244.0.1:5353",
			},
			keep: []string{
				"198.51.100.1:4001 10.96.0.10:53",
				"198.51.100.1:4001 172.18.0.1:30053",
				"198.51.100.1:4001 10.96.0.11:53 10.244.0.1:5353",
				"198.51.100.1:4001 203.0.113.7:30053 10.244.0.1:5353",
			},
		},
		{
			name:   "an address less",
			before: []string{"clusterip 10.96.0.10:53 external 203.0.113.1:53 backend 10.244.0.1:5353"},
			after:  []string{"clusterip 10.96.0.10:53 backend 10.244.0.1:5353"},
			gone:   []string{"198.51.100.1:4000 203.0.113.1:53 10.244.0.1:5353"},
			keep:   []string{"198.51.100.1:4000 10.96.0.10:53 10.244.0.1:5353"},
		},
		{
			name:   "addresses and NodePort changed",
			before: []string{all4},
			after:  []string{"clusterip 10.96.0.10:53 external 203.0.113.2:53 nodeport 0.0.0.0:30054 backend 10.244.0.1:5353 backend 10.244.0.2:5353"},
			gone: []string{
				"198.51.100.1:4000 203.0.113.1:53 10.244.0.2:5353",
				"198.51.100.1:4000 172.18.0.1:30053 10.244.0.1:5353",
			},
			keep: []string{"198.51.100.1:4000 10.96.0.10:53 10.244.0.1:5353"},
		},
		{
			name:   "address taken over by another Service",
			before: []string{dns4, "held 10.96.0.10:53 backend 10.244.0.7:53"},
			after:  []string{"held 10.96.0.10:53 backend 10.244.0.1:5353", "clusterip 10.96.0.10:53 backend 10.244.0.7:53"},
			gone:   []string{"198.51.100.1:4000 10.96.0.10:53 10.244.0.1:5353"},
			keep:   []string{"198.51.100.1:4001 10.96.0.10:53 10.244.0.7:53"},
		},
		{
			name:   "address given back to the Service before",
			before: []string{"held 10.96.0.10:53 backend 10.244.0.1:5353", "clusterip 10.96.0.10:53 backend 10.244.0.7:53"},
			after:  []string{dns4, "held 10.96.0.10:53 backend 10.244.0.7:53"},
			keep:   []string{"198.51.100.1:4000 10.96.0.10:53 10.244.0.1:5353"},
			gone:   []string{"198.51.100.1:4001 10.96.0.10:53 10.244.0.7:53"},
		},
		{
			name:   "what is of others",
			before: []string{all4},
			after:  []string{"clusterip 10.96.0.10:53 nodeport 0.0.0.0:30053 backend 10.244.0.9:5353"},
			gone:   []string{"198.51.100.1:4000 10.96.0.10:53 10.244.0.1:5353"}, // or nothing was looked at
			keep: []string{
				"tcp 198.51.100.1:4000 10.96.0.10:53 10.244.0.1:5353",
				"sctp 198.51.100.1:4000 10.96.0.10:53 10.244.0.1:5353",
				"tcp 198.51.100.1:4000 172.18.0.1:30053 10.244.0.1:5353",
				"zone=1 198.51.100.1:4000 10.96.0.10:53 10.244.0.1:5353",
				"198.51.100.1:4000 172.18.0.1:8053 10.244.0.1:5353",    // a hostPort
				"198.51.100.1:4000 203.0.113.7:30053 10.244.0.1:5353",  // not this host
				"198.51.100.1:4000 8.8.8.8:30053",                      // passes
				"198.51.100.1:4000 10.96.0.10:54 10.244.0.1:5353",      // another port
				"198.51.100.1:4000 10.96.0.77:53 10.244.0.1:5353",      // another proxy's
				"10.244.0.1:5353 198.51.100.1:4000",                    // from a backend
				"[2001:db8::1]:4000 [fd00:18::1]:30053 [fd00:10::1]:1", // only IPv4 has the NodePort
			},
		},
		{
			name:      "ended before this process",
			before:    nil, // no process
			after:     []string{"clusterip 10.96.0.10:53 backend 10.244.0.1:5353", "nodeport 0.0.0.0:30054 external 203.0.113.2:53 backend 10.244.0.2:53"},
			exclusive: true,
			gone: []string{
				"198.51.100.1:4000 10.96.0.11:53 10.244.0.2:5353",
				"198.51.100.1:4000 10.96.0.10:53 10.244.0.2:5353",
				"[2001:db8::1]:4000 [fd00:10:96::a]:53 [fd00:10:244::1]:5353",
			},
			keep: []string{
				"198.51.100.1:4000 203.0.113.1:53 10.244.0.1:5353", // only ClusterIPs are known to be the proxy's
				"198.51.100.1:4000 172.18.0.1:30053 10.244.0.1:5353",
				"198.51.100.1:4001 10.96.0.10:53 10.244.0.1:5353",
				"198.51.100.1:4001 172.18.0.1:30054 10.244.0.2:53",
				"198.51.100.1:4001 10.96.0.11:53",
				"tcp 198.51.100.1:4001 10.96.0.11:53 10.244.0.2:5353",
				"198.51.100.1:4001 203.0.113.3:53 10.244.0.1:5353",
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := makeTable(append(slices.Clone(test.keep), test.gone...)...)
			flows := c.flows
			c.flows = nil
			r := staleudp.New(staleudp.Options{Table: c, Exclusive: test.exclusive})
			if test.before != nil {
				r.Observe(full(decisions(test.before)...))
				reconcile(t, r, 0)
			}
			c.flows = slices.Clone(flows)
			r.Observe(full(decisions(test.after)...))
			reconcile(t, r, len(test.gone))
			if diff := cmp.Diff(makeTable(test.keep...).left(), c.left()); diff != "" {
				t.Errorf("entries left (-want +got):\n%s", diff)
			}

			// What is right is left alone, whatever comes again.
			dumps := c.dumps
			r.Observe(full(decisions(test.after)...))
			reconcile(t, r, 0)
			if c.dumps != dumps {
				t.Errorf("%d dumps per family, then %d, though nothing changed", dumps, c.dumps)
			}

			// The same by increments, in either order.
			if test.before == nil {
				return
			}
			for _, reversed := range []bool{false, true} {
				c.flows = nil
				r := staleudp.New(staleudp.Options{Table: c})
				r.Observe(full(decisions(test.before)...))
				reconcile(t, r, 0)
				c.flows = slices.Clone(flows)
				u := &proxier.Update{}
				before, after := decisions(test.before), decisions(test.after)
				for i := range max(len(before), len(after)) {
					var c proxier.PortChange
					if i < len(before) {
						c.Old = before[i]
					}
					if i < len(after) {
						c.New = after[i]
					}
					u.Changes = append(u.Changes, c)
				}
				if reversed {
					slices.Reverse(u.Changes)
				}
				r.Observe(u)
				reconcile(t, r, len(test.gone))
				if diff := cmp.Diff(makeTable(test.keep...).left(), c.left()); diff != "" {
					t.Errorf("entries left after increments, reversed=%v (-want +got):\n%s", reversed, diff)
				}
			}
		})
	}
}

func decisions(texts []string) (list []*proxier.Decision) {
	for i, text := range texts {
		list = append(list, udp(fmt.Sprint("s", i), text))
	}
	return list
}

func reconcileAll(r *staleudp.Reconciler) (deleted int, err error) {
	var errs []error
	for family := range proxier.Families {
		n, err := r.Reconcile(bg, family)
		deleted += n
		errs = append(errs, err)
	}
	return deleted, errors.Join(errs...)
}

func reconcile(tb testing.TB, r *staleudp.Reconciler, want int) {
	tb.Helper()
	deleted, err := reconcileAll(r)
	if err != nil {
		tb.Fatal(err)
	}
	if deleted != want {
		tb.Errorf("deleted %d entries, want %d", deleted, want)
	}
}

// TestDumps: the table is read only if an entry may be wrong, and only of the family
// that is concerned.
func TestDumps(t *testing.T) {
	one := udp("a", "clusterip 10.96.0.10:53 clusterip [fd00:10:96::a]:53 backend 10.244.0.1:53 backend [fd00:10:244::1]:53")
	two := udp("a", "clusterip 10.96.0.10:53 clusterip [fd00:10:96::a]:53 backend 10.244.0.1:53 backend 10.244.0.2:53 backend [fd00:10:244::1]:53")
	tcp := makeDecision("t", proxier.TCP, "clusterip 10.96.0.11:53 backend 10.244.0.1:53")
	c := makeTable()
	r := staleudp.New(staleudp.Options{Table: c})
	for _, step := range []struct {
		name   string
		update *proxier.Update
		want   [proxier.Families]int
	}{
		{"nothing of UDP", full(tcp), [...]int{0, 0}},
		{"a Service", full(tcp, one), [...]int{1, 1}},
		{"all again", full(tcp, udp("a", "clusterip 10.96.0.10:53 clusterip [fd00:10:96::a]:53 backend 10.244.0.1:53 backend [fd00:10:244::1]:53")), [...]int{0, 0}},
		{"a backend more", change(one, two), [...]int{0, 0}},
		{"a backend less", change(two, one), [...]int{1, 0}},
		{"TCP is gone", change(tcp, nil), [...]int{0, 0}},
		{"UDP is gone", full(), [...]int{1, 1}},
	} {
		c.dumps = [proxier.Families]int{}
		r.Observe(step.update)
		reconcile(t, r, 0)
		if c.dumps != step.want {
			t.Errorf("%s: %d dumps per family, want %d", step.name, c.dumps, step.want)
		}
	}
}

// TestPartOfTheServices: what was not seen yet is not taken for left over.
func TestPartOfTheServices(t *testing.T) {
	c := makeTable("198.51.100.1:4000 10.96.0.11:53 10.244.0.1:53", "198.51.100.1:4000 172.18.0.1:30053 10.244.0.1:53")
	r := staleudp.New(staleudp.Options{Table: c, Exclusive: true})
	u := change(nil, udp("a", dns4))
	u.NodeRules = &rules
	r.Observe(u)
	reconcile(t, r, 0)
	r.Observe(full(udp("a", dns4), udp("b", "clusterip 10.96.0.11:53 nodeport 0.0.0.0:30053 backend 10.244.0.1:53")))
	reconcile(t, r, 0)
}

// TestOneFamily: a family whose rules are not written yet can wait, without a loss.
func TestOneFamily(t *testing.T) {
	c := makeTable("198.51.100.1:4000 10.96.0.10:53 10.244.0.1:53", "[2001:db8::1]:4000 [fd00:10:96::a]:53 [fd00:10:244::1]:53")
	r := staleudp.New(staleudp.Options{Table: c})
	before := udp("a", "clusterip 10.96.0.10:53 clusterip [fd00:10:96::a]:53 backend 10.244.0.1:53 backend [fd00:10:244::1]:53")
	r.Observe(full(before))
	reconcile(t, r, 0)
	r.Observe(change(before, nil))
	for i, family := range []proxier.Family{proxier.IPv6, proxier.IPv6, proxier.IPv4} {
		deleted, err := r.Reconcile(bg, family)
		if want := []int{1, 0, 1}[i]; err != nil || deleted != want {
			t.Errorf("call %d, %s: deleted %d, want %d; error %v", i, family, deleted, want, err)
		}
	}
}

// TestGoneOnce: flows of a later owner of a deleted Service's address are not touched.
func TestGoneOnce(t *testing.T) {
	c := makeTable()
	r := staleudp.New(staleudp.Options{Table: c})
	r.Observe(full(udp("a", all4)))
	reconcile(t, r, 0)
	r.Observe(full())
	reconcile(t, r, 0)
	c.flows = makeTable("198.51.100.1:4000 172.18.0.1:30053 10.244.0.1:53").flows // a hostPort by now
	r.Observe(full(udp("b", "clusterip 10.96.0.11:53 backend 10.244.0.1:53")))
	reconcile(t, r, 0)
}

func TestErrors(t *testing.T) {
	boom := errors.New("boom")
	stale := []string{"198.51.100.1:4000 10.96.0.10:53 10.244.0.1:5353", "198.51.100.1:4001 10.96.0.10:53 10.244.0.2:5353"}
	for _, test := range []struct {
		name    string
		harm    func(*table)
		want    error
		deleted int // by the first call
		dumps   int
	}{
		{"interrupted four times", func(c *table) { c.interruptions = 4 }, nil, 2, 5},
		{"interrupted five times", func(c *table) { c.interruptions = 5 }, conntrack.ErrInterrupted, 1, 5},
		{"no dump", func(c *table) { c.listError = boom }, boom, 0, 1},
		{"no delete", func(c *table) { c.deleteErr = boom }, boom, 0, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := makeTable(stale...)
			var results []staleudp.Result
			ended := map[uint32]bool{}
			r := staleudp.New(staleudp.Options{
				Table: c, Observer: func(r staleudp.Result) { results = append(results, r) },
				Ended: func(flows []conntrack.Flow) {
					for _, f := range flows {
						ended[f.ID] = true
					}
				},
			})
			before := udp("a", dns4)
			r.Observe(full(before))
			reconcile(t, r, 0)
			results, c.dumps = nil, [proxier.Families]int{}
			r.Observe(change(before, nil))
			test.harm(c)

			deleted, err := reconcileAll(r)
			if deleted != test.deleted || !errors.Is(err, test.want) || (err != nil) != (test.want != nil) {
				t.Errorf("deleted %d with error %v, want %d with %v", deleted, err, test.deleted, test.want)
			}
			if c.dumps[proxier.IPv4] != test.dumps {
				t.Errorf("%d dumps, want %d", c.dumps[proxier.IPv4], test.dumps)
			}
			if len(results) != 1 || results[0].Family != proxier.IPv4 || results[0].Deleted != deleted || !errors.Is(results[0].Err, test.want) {
				t.Errorf("observed %+v", results)
			}
			reconcile(t, r, len(stale)-deleted) // what is owed
			if len(ended) != len(stale) {
				t.Errorf("told of the entries %v", ended)
			}
			if left := c.left(); left != nil {
				t.Errorf("entries left: %v", left)
			}
			dumps := c.dumps
			reconcile(t, r, 0)
			if c.dumps != dumps {
				t.Error("asked again, though nothing is owed")
			}
		})
	}
}
