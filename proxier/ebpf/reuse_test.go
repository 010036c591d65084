// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/proxier/ebpf/writer/writertest"
	"github.com/tandem-proxy/tandem/test/lab"
)

// The kernel reuses elements of hash maps for other keys while programs still hold pointers to
// them. These tests check that programs notice it.

// rewritten is a dual-stack Service whose frontends the test rewrites. Its backends have no
// listeners: connect() of a UDP socket sends nothing.
type rewritten struct {
	vips, backends [2]netip.AddrPort // IPv4, IPv6
}

func rewrittenServices(n *node, count int) []rewritten {
	all := make([]rewritten, count)
	for i := range all {
		s := &all[i]
		name := fmt.Sprintf("s%d", i)
		service := dualService()
		service.Name = name
		service.Spec.ClusterIPs = nil
		slices := slicesOf(name)
		for family, format := range []string{"10.%d.7.%d", "fd00:10:%d::7:%d"} {
			s.vips[family] = netip.AddrPortFrom(netip.MustParseAddr(fmt.Sprintf(format, 96, i)), 80)
			s.backends[family] = netip.AddrPortFrom(netip.MustParseAddr(fmt.Sprintf(format, 244, i)), targetPort)
			service.Spec.ClusterIPs = append(service.Spec.ClusterIPs, s.vips[family].Addr().String())
			slices[family].Endpoints = writertest.Slice("", "", s.backends[family].Addr().String()).Endpoints
			n.OnEndpointSliceAdd(slices[family])
		}
		n.OnServiceAdd(service)
	}
	return all
}

// TestFrontendsRewrittenUnderLoad: frontends change between the sets of their Service, and those
// of the first Service are deleted and added, as fast as possible. Clients get only backends of
// the right Service and family. Clients of a frontend that is never deleted always get one.
func TestFrontendsRewrittenUnderLoad(t *testing.T) {
	const services, duration = 8, 3 * time.Second
	l := lab.NewT(t)
	one := l.Node("node1")
	client := one.Pod("client")
	// Without the getpeername hook, getpeername() returns the backend. The map is full, so that
	// its buckets have as many elements as possible.
	sizes := lbmap.Sizes{Frontends: services * 4, Services: 32, Backends: 64, Slots: 64, Affinity: 16, UDPPeers: 16, OptOuts: 16}
	n := newNode(t, one, l, Options{NoGetpeername: true, Sizes: sizes})
	all := rewrittenServices(n, services)
	n.sync(t)

	// Each frontend has two values: for the cluster set, and for the local set with affinity.
	tables := tablesOf(n.tier)
	var stay, move []lbmap.FrontendKey
	var stayValues, moveValues [2][]lbmap.FrontendValue
	err := tables.Frontends.Dump(func(key lbmap.FrontendKey, value lbmap.FrontendValue) {
		keys, values := &stay, &stayValues
		if addr := lbmap.ToAddr(key.Addr); addr == all[0].vips[0].Addr() || addr == all[0].vips[1].Addr() {
			keys, values = &move, &moveValues
			f := lbmap.FrontendEntry{Key: key, Value: value}
			tables.Sets[writertest.SetID(f, proxier.FromPod)+1] = tables.Sets[writertest.SetID(f, proxier.FromPod)]
		}
		*keys = append(*keys, key)
		for i := range uint32(2) {
			// RouteLocal for pods is the lowest bit.
			f := lbmap.NewFrontendEntry(key, lbmap.FrontendValue{Service: value.Service, Flags: value.Flags + i, Affinity: i * 600})
			values[i] = append(values[i], f.Value)
		}
	})
	if err != nil || len(move) != 4 {
		t.Fatal(len(move), err)
	}
	// The order of the writer: first the new set, then the frontends, then the old set.
	switchTo := func(now int) error {
		from, to := stayValues[1-now], stayValues[now]
		set := func(i int, v lbmap.FrontendValue) *uint64 {
			f := lbmap.FrontendEntry{Key: stay[i], Value: v}
			return &tables.Sets[writertest.SetID(f, proxier.FromPod)]
		}
		for i := range to {
			atomic.StoreUint64(set(i, to[i]), *set(i, from[i]))
		}
		_, err := tables.Frontends.Update(stay, to)
		for i := range from {
			atomic.StoreUint64(set(i, from[i]), lbmap.UnusedSet)
		}
		return err
	}

	ctx, stop := context.WithTimeout(t.Context(), duration)
	defer stop()
	var connects, missed, refused, strangers atomic.Int64
	var wg sync.WaitGroup
	for family, domain := range []int{unix.AF_INET, unix.AF_INET6} {
		wg.Go(func() {
			err := client.Do(func() error {
				fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
				if err != nil {
					return err
				}
				defer unix.Close(fd)
				for i := 0; ctx.Err() == nil; i++ {
					s := &all[0] // every other connection
					if i%2 != 0 {
						s = &all[1+i/2%(services-1)]
					}
					connects.Add(1)
					to, err := connectedTo(fd, s.vips[family])
					switch {
					case err == nil && to == s.backends[family]:
					case err == nil && to == s.vips[family]:
						if s != &all[0] {
							missed.Add(1)
						}
					case errors.Is(err, unix.ECONNREFUSED):
						refused.Add(1)
					default:
						if strangers.Add(1) <= 5 {
							t.Errorf("dialled %s, got %s, %v", s.vips[family], to, err)
						}
					}
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	steps, absent := 0, 0
	for ; ctx.Err() == nil && !t.Failed(); steps++ {
		if steps%len(move) == 0 {
			if err := switchTo(1 - steps/len(move)%2); err != nil {
				t.Error(err)
			}
		}
		// The added frontend gets the element of the deleted one.
		leaving := (absent + 1) % len(move)
		if err := tables.Frontends.Delete(move[leaving : leaving+1]); err != nil {
			t.Error(err)
		}
		if _, err := tables.Frontends.Update(move[absent:absent+1], moveValues[steps%2][absent:absent+1]); err != nil {
			t.Error(err)
		}
		absent = leaving
	}
	stop()
	wg.Wait()
	t.Logf("%d connects, %d steps: %d strangers, %d missed, %d refused", connects.Load(), steps, strangers.Load(), missed.Load(), refused.Load())
	if missed.Load() > 0 {
		t.Errorf("%d connects did not find an existing frontend", missed.Load())
	}
	// If a program cannot read a consistent value, it refuses the connection. A few may happen.
	if refused.Load() > connects.Load()/100_000 {
		t.Errorf("%d of %d connects were refused", refused.Load(), connects.Load())
	}
	if !t.Failed() && (connects.Load() < 10000 || steps < 1000) {
		t.Error("too little load")
	}
}

// connectedTo connects a UDP socket, which may be connected already, and returns its peer.
func connectedTo(fd int, to netip.AddrPort) (netip.AddrPort, error) {
	var at unix.Sockaddr = &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
	if to.Addr().Is4() {
		at = &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	}
	if err := unix.Connect(fd, at); err != nil {
		return netip.AddrPort{}, err
	}
	switch peer, err := unix.Getpeername(fd); peer := peer.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(peer.Addr), uint16(peer.Port)), err
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(peer.Addr), uint16(peer.Port)), err
	default:
		return netip.AddrPort{}, err
	}
}

// frontendKeyOf returns the key of one of the targets.
func frontendKeyOf(target string) lbmap.FrontendKey {
	to := targets()[target]
	proto := proxier.TCP
	if target[:3] == "udp" {
		proto = proxier.UDP
	}
	return lbmap.FrontendKey{Addr: lbmap.FromAddr(to.Addr()), Port: lbmap.NetworkPort(to.Port()), Proto: uint8(proto)}
}

// TestForeignFrontendValue: connections are refused if a frontend has the value of another
// frontend, or an inconsistent one. The next full sync repairs it.
func TestForeignFrontendValue(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	a, client := serve(t, one.Pod("a")), one.Pod("client")
	n := newNode(t, one, l, Options{})
	n.OnServiceAdd(dualService())
	n.setPods(a)
	n.sync(t)
	value := func(network string) lbmap.FrontendValue {
		t.Helper()
		value, found, err := tablesOf(n.tier).Frontends.Lookup(frontendKeyOf(network))
		if err != nil || !found {
			t.Fatal(found, err)
		}
		return value
	}
	raced := uint64(0)
	for network, to := range targets() {
		for name, change := range map[string]func(*lbmap.FrontendValue){
			"another family": func(v *lbmap.FrontendValue) { *v = value(map[byte]string{'4': "tcp6", '6': "tcp4"}[network[3]]) },
			"another port":   func(v *lbmap.FrontendValue) { *v = value(map[byte]string{'t': "udp4", 'u': "tcp4"}[network[0]]) },
			"another set":    func(v *lbmap.FrontendValue) { v.Flags ^= lbmap.RouteLocal },
			"affinity":       func(v *lbmap.FrontendValue) { v.Affinity++ },
			"nothing":        func(v *lbmap.FrontendValue) { *v = lbmap.FrontendValue{} },
		} {
			v := value(network)
			change(&v)
			if err := n.tier.maps["tdm_frontend"].Put(frontendKeyOf(network), v); err != nil {
				t.Fatal(err)
			}
			if r, err := client.Ask(t.Context(), network[:3], to); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("%s with the value of %s: %v %v", network, name, r, err)
			}
			if now := tablesOf(n.tier).ServiceStats[0].Raced; now == raced {
				t.Errorf("%s with the value of %s: not counted", network, name)
			} else {
				raced = now
			}
			if err := n.tier.Sync(t.Context(), proxier.Update{Full: true}); err != nil {
				t.Fatal(err)
			}
			if _, err := client.Ask(t.Context(), network[:3], to); err != nil {
				t.Errorf("%s after the repair of %s: %v", network, name, err)
			}
		}
	}
}

// TestUnusedSet: a set that no frontend refers to any more is not treated as a set without
// backends: the program looks up the frontend again.
func TestUnusedSet(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	a, client := serve(t, one.Pod("a")), one.Pod("client")
	n := newNode(t, one, l, Options{})
	n.OnServiceAdd(dualService())
	n.setPods(a)
	n.sync(t)
	tables := tablesOf(n.tier)
	value, found, err := tables.Frontends.Lookup(frontendKeyOf("tcp4"))
	if err != nil || !found {
		t.Fatal(found, err)
	}
	f := lbmap.FrontendEntry{Key: frontendKeyOf("tcp4"), Value: value}
	atomic.StoreUint64(&tables.Sets[writertest.SetID(f, proxier.FromPod)], lbmap.UnusedSet)
	if r, err := client.Ask(t.Context(), "tcp", targets()["tcp4"]); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("%v %v", r, err)
	}
	if got, want := tables.ServiceStats[value.Service], (lbmap.ServiceStats{Raced: 1}); got != want {
		t.Errorf("counted %+v, want %+v", got, want)
	}
}

// TestForeignAffinity: an affinity record with a backend of the Service's other family is ignored.
// A program may see one when the kernel reuses the element.
func TestForeignAffinity(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	a, client := serve(t, one.Pod("a")), one.Pod("client")
	n := newNode(t, one, l, Options{})
	n.OnServiceAdd(dualService(func(s *v1.Service) {
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](600)}}
	}))
	n.setPods(a)
	n.sync(t)
	ask := func() {
		t.Helper()
		for network, to := range targets() {
			if r, err := client.Ask(t.Context(), network[:3], to); err != nil || r.Server != "a" {
				t.Errorf("%s: %v %v", network, r, err)
			}
		}
	}
	ask()
	type record struct {
		key   lbmap.AffinityKey
		value lbmap.Affinity
	}
	var records []record
	var r record
	all := n.tier.maps["tdm_affinity"].Iterate()
	for all.Next(&r.key, &r.value) {
		records = append(records, r)
	}
	if len(records) != len(targets()) || all.Err() != nil {
		t.Fatalf("%d records, %v", len(records), all.Err())
	}
	swapped := 0
	for _, x := range records {
		for _, y := range records {
			if x.key.Service == y.key.Service && x.key.FamilySet != y.key.FamilySet {
				if err := n.tier.maps["tdm_affinity"].Put(x.key, y.value); err != nil {
					t.Fatal(err)
				}
				swapped++
			}
		}
	}
	if swapped != len(records) {
		t.Fatalf("swapped %d of %d", swapped, len(records))
	}
	ask()
}

// TestForeignUDPPeer: a program ignores the record of another peer than the one it looks up.
func TestForeignUDPPeer(t *testing.T) {
	l := lab.NewT(t)
	one := l.Node("node1")
	a, b, client := serve(t, one.Pod("a")), serve(t, one.Pod("b")), one.Pod("client")
	n := newNode(t, one, l, Options{})
	to := map[string]netip.AddrPort{"s1": netip.MustParseAddrPort("10.96.1.1:80"), "s2": netip.MustParseAddrPort("10.96.1.2:80")}
	for name, at := range to {
		s := dualService()
		s.Name, s.Spec.ClusterIPs = name, []string{at.Addr().String()}
		n.OnServiceAdd(s)
		for _, s := range slicesOf(name, map[string]*lab.Pod{"s1": a, "s2": b}[name]) {
			n.OnEndpointSliceAdd(s)
		}
	}
	n.sync(t)
	c, err := client.ListenUDP(unix.AF_INET)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	exchange(t, c, to["s1"]) // stored in the socket's storage
	if from := exchange(t, c, to["s2"]); from != to["s2"] {
		t.Fatalf("reply from %s", from)
	}
	var key lbmap.UDPPeerKey
	var own lbmap.UDPPeer
	peers := n.tier.maps["tdm_udp_peer"]
	all := peers.Iterate()
	if !all.Next(&key, &own) || lbmap.ToAddrPort(own.Vip, own.VipPort) != to["s2"] {
		t.Fatalf("%+v %+v %v", key, own, all.Err())
	}
	foreign := own
	foreign.Vip = lbmap.FromAddr(to["s1"].Addr())

	for _, test := range []struct {
		value lbmap.UDPPeer
		want  netip.AddrPort
	}{{foreign, netip.AddrPortFrom(b.Addr4, targetPort)}, {own, to["s2"]}} {
		if _, err := c.WriteToUDPAddrPort([]byte("hello\n"), to["s2"]); err != nil {
			t.Fatal(err)
		}
		if err := peers.Update(key, test.value, ciliumebpf.UpdateExist); err != nil {
			t.Fatal(err)
		}
		if _, from, err := c.ReadFromUDPAddrPort(make([]byte, 256)); err != nil || from != test.want {
			t.Errorf("reply from %s, %v; want %s", from, err, test.want)
		}
	}
	// The next request overwrites the record.
	if err := peers.Update(key, foreign, ciliumebpf.UpdateExist); err != nil {
		t.Fatal(err)
	}
	if from := exchange(t, c, to["s2"]); from != to["s2"] {
		t.Errorf("reply from %s", from)
	}
}
