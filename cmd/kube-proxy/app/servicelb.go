// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/sockdiag"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/servicelb/nodereport"
)

// reportInterval is how often this node's listening sockets are looked up while there is a Service of ServiceLB. In mode ebpf they are looked
// up when one is bound, too.
const reportInterval = time.Second

// listenDelays is how long after the one before listening sockets are looked up, once a process has bound a socket: it may listen a moment
// later.
var listenDelays = []time.Duration{10 * time.Millisecond, 50 * time.Millisecond, 200 * time.Millisecond}

// listingFails is how long listing sockets has to fail until the report says so.
const listingFails = 5 * time.Second

// reports tells the controller of ServiceLB what this node serves, and which processes of the host listen at the ports. It implements
// proxier.Observer to know when that may be something else.
type reports struct {
	server   *nodereport.Server
	synced   atomic.Bool // once: until then, this process knows less than the one before it did
	interval time.Duration
	wake     chan struct{}
	bound    chan struct{}
}

func newReports() *reports {
	return &reports{server: nodereport.NewServer(), interval: reportInterval, wake: make(chan struct{}, 1), bound: make(chan struct{}, 1)}
}

// tell makes a channel with room for one ready, if it is not.
func tell(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Queued implements proxier.Observer.
func (*reports) Queued(time.Time) {}

// Synced implements proxier.Observer.
func (r *reports) Synced(info proxier.SyncInfo) {
	if info.Err != nil {
		return
	}
	if first := !r.synced.Swap(true); info.Services == 0 && !info.Full && !first {
		return
	}
	tell(r.wake)
}

// run makes reports until ctx is done.
func (r *reports) run(ctx context.Context, table *proxier.Table, open activeMode) {
	logger := klog.FromContext(ctx)
	ticker := time.NewTicker(r.interval)
	defer ticker.Stop()
	again := time.NewTimer(0)
	defer again.Stop()
	var delays []time.Duration // of again
	defer r.server.End()
	var binds sync.WaitGroup
	defer binds.Wait()
	binds.Go(func() {
		if err := open.followBinds(ctx, func() { tell(r.bound) }); err != nil {
			logger.Error(err, "Cannot learn when processes of the host bind ports of Services; they are looked up at intervals", "interval", r.interval)
		}
	})
	failed, listed := "", time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.wake:
		case <-ticker.C:
		case <-r.bound:
			delays = listenDelays
		case <-again.C:
		}
		if len(delays) > 0 {
			again.Reset(delays[0])
			delays = delays[1:]
		}
		if !r.synced.Load() {
			continue
		}
		var report nodereport.Report
		if list := table.AtNodes(); len(list) > 0 {
			facts := table.Facts()
			report.Services = servicesOf(list, &facts, open)
			for _, a := range facts.UplinkAddrs {
				if a.Addr.IsGlobalUnicast() {
					report.Addresses = append(report.Addresses, nodereport.Address{Interface: a.Device, Address: a.Addr})
				}
			}
			var err error
			if report.Listeners, err = listenersAt(ctx, list); err == nil {
				failed, listed = "", time.Now()
			} else if failed != err.Error() && ctx.Err() == nil {
				failed = err.Error()
				logger.Error(err, "Cannot list the sockets of this node; ServiceLB tries TCP connections to find processes of the host that listen at ports of Services")
			}
			if err != nil && time.Since(listed) < listingFails {
				continue // the previous report stays: one without listeners would say that the ports are free
			}
			if err != nil {
				report.Listeners, report.NoListeners = nil, err.Error()
			}
		}
		r.server.Set(report)
	}
}

// servicesOf has, for each Service and each address of this node that it asked for, whether it is served there.
func servicesOf(list []proxier.AtNodes, facts *proxier.Facts, open activeMode) map[string]*nodereport.Service {
	services := map[string]*nodereport.Service{}
	for i := range list {
		d := &list[i]
		name := d.Name.NamespacedName.String()
		s := services[name]
		if s == nil {
			s = &nodereport.Service{}
			services[name] = s
		}
		p := nodereport.Port{Protocol: d.Name.Protocol.String(), Port: d.Port}
		for _, a := range d.Asked {
			if !facts.HasAddress(a) {
				continue
			}
			served := nodereport.Served{Address: a}
			if f := d.At(a); f == nil {
				served.LeftOut, served.Fault = true, "the Service, or its annotations, leave this node or its load balancer addresses out"
			} else {
				served.Direct = f.Routes[proxier.FromOutside].Direct
				if err := faultOf(d.Decision, f, uplinksWith(facts, a), open); err != nil {
					served.Fault = err.Error()
				}
			}
			p.Served = append(p.Served, served)
		}
		s.Ports = append(s.Ports, p)
	}
	return services
}

// uplinksWith are the uplinks that have an address, by which its packets come in. There is none for one that is translated on the way, or
// that another device has: its packets may come in by any.
func uplinksWith(facts *proxier.Facts, a netip.Addr) (names []string) {
	for _, of := range facts.UplinkAddrs {
		if of.Addr == a {
			names = append(names, of.Device)
		}
	}
	return names
}

// faultOf is why clients outside are not served at a frontend; nil if they are.
func faultOf(d *proxier.Decision, f *proxier.Frontend, uplinks []string, open activeMode) error {
	switch s := open.serves(d, f, proxier.FromOutside); {
	case f.Conflict != nil:
		return fmt.Errorf("%s has the port", f.Conflict.NamespacedName)
	case open.isUnplaced(d):
		return fmt.Errorf("tables are full")
	case s.by == "" && s.refused != nil:
		return s.refused
	case s.by == "":
		return fmt.Errorf("nothing serves it")
	}
	return open.lacks(d, f, uplinks)
}

// listenersAt are the sockets of this network namespace that listen at ports of Services.
func listenersAt(ctx context.Context, list []proxier.AtNodes) (found []nodereport.Listener, err error) {
	type key struct {
		protocol proxier.Protocol
		port     uint16
	}
	ports := map[key]bool{}
	for i := range list {
		ports[key{list[i].Name.Protocol, list[i].Port}] = true
	}
	err = sockdiag.Listening(ctx, func(p inet.Protocol, at netip.AddrPort) {
		if !at.Addr().IsLoopback() && ports[key{p, at.Port()}] {
			found = append(found, nodereport.Listener{Protocol: p.String(), Address: at.Addr(), Port: at.Port()})
		}
	})
	slices.SortFunc(found, nodereport.Listener.Compare)
	return slices.Compact(found), err
}
