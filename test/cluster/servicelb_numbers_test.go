// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/servicelb"
	"github.com/tandem-proxy/tandem/servicelb/nodereport"
	"github.com/tandem-proxy/tandem/test/binary"
)

// standIns are the kube-proxies of nodes that have no namespace of their own: they report each Service as served once they see that they
// are to serve it. Those of one test share a watch.
type standIns struct {
	c *cluster

	mu       sync.Mutex
	addrs    []netip.Addr
	servers  []*nodereport.Server
	close    []func() // has a node not answer any more
	reports  []map[string]*nodereport.Service
	services map[string]*v1.Service
	seen     map[string]func(*v1.Service) // told of each version of a Service
}

// newStandIns adds nodes with addresses of their own on the control plane's node.
func (c *cluster) newStandIns(n int) *standIns {
	c.tb.Helper()
	x := &standIns{c: c, services: map[string]*v1.Service{}, seen: map[string]func(*v1.Service){}}
	at := c.plane.node
	lo, err := at.Netlink().LinkByName("lo")
	if err != nil {
		c.tb.Fatal(err)
	}
	for i := range n {
		a := netip.AddrFrom4([4]byte{10, 77, byte(i / 250), byte(1 + i%250)})
		if err := at.Netlink().AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(32, 32)}}); err != nil {
			c.tb.Fatal(err)
		}
		l, err := at.Listen(netip.AddrPortFrom(a, 10256).String())
		if err != nil {
			c.tb.Fatal(err)
		}
		server, mux := nodereport.NewServer(), http.NewServeMux()
		server.Install(mux)
		server.Set(nodereport.Report{})
		mux.HandleFunc("/healthz", func(http.ResponseWriter, *http.Request) {})
		s := &http.Server{Handler: mux, ReadHeaderTimeout: time.Second}
		go func() { _ = s.Serve(l) }()
		end := sync.OnceFunc(func() { server.End(); s.Close() })
		c.tb.Cleanup(end)
		x.addrs, x.servers, x.close = append(x.addrs, a), append(x.servers, server), append(x.close, end)
		x.reports = append(x.reports, map[string]*nodereport.Service{})

		node, err := c.client.CoreV1().Nodes().Create(c.tb.Context(), &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("stand-in-%d", i)}}, metav1.CreateOptions{})
		if err != nil {
			c.tb.Fatal(err)
		}
		node.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: a.String()}}
		node.Status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue}}
		if _, err := c.client.CoreV1().Nodes().UpdateStatus(c.tb.Context(), node, metav1.UpdateOptions{}); err != nil {
			c.tb.Fatal(err)
		}
	}
	factory := informers.NewSharedInformerFactory(c.client, 0)
	_, err = factory.Core().V1().Services().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { x.see(o.(*v1.Service)) },
		UpdateFunc: func(_, o any) { x.see(o.(*v1.Service)) },
	})
	if err != nil {
		c.tb.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	factory.Start(ctx.Done())
	c.tb.Cleanup(func() { stop(); factory.Shutdown() })
	return x
}

// see reports a Service as served where it is to be. Benchmarks only add Services.
func (x *standIns) see(s *v1.Service) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if tell := x.seen[s.Name]; tell != nil {
		tell(s)
	}
	if s.Spec.LoadBalancerClass == nil {
		return
	}
	served := nodereport.Probed(s.Status.Conditions)
	for _, i := range s.Status.LoadBalancer.Ingress {
		served = append(served, netip.MustParseAddr(i.IP))
	}
	name := s.Namespace + "/" + s.Name
	for i, server := range x.servers {
		p, a := nodereport.Port{Protocol: "TCP", Port: uint16(s.Spec.Ports[0].Port)}, x.addrs[i]
		if slices.Contains(served, a) {
			p.Served = []nodereport.Served{{Address: a}}
		}
		if was := x.reports[i][name]; was == nil || len(was.Ports[0].Served) != len(p.Served) {
			x.reports[i] = maps.Clone(x.reports[i])
			x.reports[i][name] = &nodereport.Service{Ports: []nodereport.Port{p}}
			server.Set(nodereport.Report{Services: x.reports[i]})
		}
	}
}

// advertised returns a channel that is closed once a Service has n addresses in its status.
func (x *standIns) advertised(name string, n int) <-chan struct{} {
	done := make(chan struct{})
	x.mu.Lock()
	defer x.mu.Unlock()
	x.seen[name] = func(s *v1.Service) {
		if len(s.Status.LoadBalancer.Ingress) == n {
			close(done)
			delete(x.seen, name)
		}
	}
	return done
}

// BenchmarkServiceLB measures the controller of ServiceLB with 1,000 Services on 50 nodes, whose kube-proxies are stand-ins in this process:
// the time until all Services have their addresses, that from a change of one Service to its status, memory, writes without a change, and the
// time from the end of one node's kube-proxy until no Service has its address.
// A new Service takes two writes of the status, with reports of all nodes between them, and another annotation one.
func BenchmarkServiceLB(b *testing.B) {
	const services, nodes, changes = 1000, 50, 50
	path, err := binary.Build(b.TempDir(), "servicelb")
	if err != nil {
		b.Fatal(err)
	}
	c := newCluster(b, 0, nil)
	c.allowServiceLB()
	x := c.newStandIns(nodes)
	create := func(i int) (begun time.Time, name string) {
		name = fmt.Sprintf("lb-%04d", i)
		s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}}
		s.Spec = v1.ServiceSpec{
			Type: v1.ServiceTypeLoadBalancer, LoadBalancerClass: new(servicelb.Class), AllocateLoadBalancerNodePorts: ptr.To(false),
			Ports: []v1.ServicePort{{Port: int32(11000 + i), TargetPort: intstr.FromInt32(80)}},
		}
		begun = time.Now()
		if _, err := c.client.CoreV1().Services(namespace).Create(b.Context(), s, metav1.CreateOptions{}); err != nil {
			b.Fatal(err)
		}
		return begun, name
	}
	wait := func(what string, done <-chan struct{}) {
		select {
		case <-done:
		case <-time.After(2 * time.Minute):
			b.Fatalf("%s: there is no status", what)
		}
	}
	for i := range services {
		create(i)
	}
	all := make([]<-chan struct{}, services)
	for i := range all {
		all[i] = x.advertised(fmt.Sprintf("lb-%04d", i), nodes)
	}
	began := time.Now()
	w := c.startServiceLB(path)
	for i, done := range all {
		wait(fmt.Sprint("Service ", i), done)
	}
	took := time.Since(began)

	var created, changed []time.Duration
	for i := range changes {
		done := x.advertised(fmt.Sprintf("lb-%04d", services+i), nodes)
		begun, name := create(services + i)
		wait(name, done)
		created = append(created, time.Since(begun))
		time.Sleep(100 * time.Millisecond) // Events and reports end

		done = x.advertised(name, 1)
		begun = time.Now()
		c.edit(name, func(s *v1.Service) {
			s.Annotations = map[string]string{servicelb.AnnotationAddresses: x.addrs[0].String()}
		})
		wait(name, done)
		changed = append(changed, time.Since(begun))
		time.Sleep(100 * time.Millisecond)
	}
	rss, peak := w.Memory(b, "VmRSS"), w.Memory(b, "VmHWM")
	writes := func() (n int) {
		text, err := os.ReadFile(c.plane.path("audit.log"))
		if err != nil {
			b.Fatal(err)
		}
		return strings.Count(string(text), "/status\",\"verb\":\"update\",\"user\":{\"username\":\""+serviceLBUser+"\"")
	}
	before := writes()
	if before < services {
		b.Errorf("the audit log has %d writes", before)
	}
	time.Sleep(2 * settle)
	b.ReportMetric(float64(writes()-before), "writes-without-change")
	for i := range all {
		all[i] = x.advertised(fmt.Sprintf("lb-%04d", i), nodes-1)
	}
	began = time.Now()
	x.close[nodes-1]()
	for i, done := range all {
		wait(fmt.Sprint("Service ", i), done)
	}
	b.ReportMetric(time.Since(began).Seconds(), "s-lost")
	b.ReportMetric(took.Seconds(), "s-start")
	for name, list := range map[string][]time.Duration{"created": created, "changed": changed} {
		slices.Sort(list)
		b.ReportMetric(float64(list[len(list)/2].Microseconds())/1e3, "ms-"+name+"-p50")
		b.ReportMetric(float64(list[len(list)*95/100].Microseconds())/1e3, "ms-"+name+"-p95")
	}
	b.ReportMetric(rss, "MiB-rss")
	b.ReportMetric(peak, "MiB-peak")
	b.ReportMetric(0, "ns/op")
	w.Terminate(b)
}
