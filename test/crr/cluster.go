// SPDX-License-Identifier: Apache-2.0

//go:build linux

package crr

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/test/fakeapi"
	"github.com/tandem-proxy/tandem/test/lab"
)

// Path is a way through a Service to a pod.
type Path int

// The paths. Clients outside dial the first node.
const (
	// NodePortLocal goes from outside by a NodePort to a pod of that node. As
	// externalTrafficPolicy is Cluster, the pod does not see the client.
	NodePortLocal Path = iota
	// LoadBalancerLocal goes from outside by a load balancer IP with
	// externalTrafficPolicy Local to a pod of that node, which sees the client.
	LoadBalancerLocal
	// NodePortRemote goes from outside by a NodePort to a pod of another node.
	NodePortRemote
	// ClusterIPLocal goes from a pod by a ClusterIP to a pod of the same node.
	ClusterIPLocal
	Paths
)

func (p Path) String() string {
	return [...]string{"nodeport-local", "loadbalancer-local", "nodeport-remote", "clusterip-local"}[p]
}

const (
	targetPort  = 8080
	servicePort = 80

	// The range that clusters have by default. Services that do not fit into
	// it have none.
	firstNodePort, nodePorts = 30000, 2768
)

// loadBalancers holds the load balancer IPs; the range is meant for benchmarks.
var loadBalancers = netip.MustParsePrefix("198.18.0.0/16")

// Cluster is the cluster of one variant: two nodes, clients and servers.
type Cluster struct {
	Lab *lab.Lab
	// Nodes, of which each needs a proxy: rules also see what other nodes send.
	Nodes [2]*lab.Node
	// Objects are the Services, of a fourth of which each path uses the address
	// (NodePorts while there are ports), and their EndpointSlices.
	Objects []fakeapi.Object

	conntrack [2]*netlink.Handle // of the nodes
	clients   [Paths]*lab.Sandbox
	servers   [Paths]*lab.Pod
	services  [Paths][]netip.AddrPort
}

// NewCluster makes a cluster with so many Services, without a proxy. Every Service
// leads to a server, so that a connection can go to another one each time: what
// a proxy needs to find one may depend on where it keeps it.
func NewCluster(l *lab.Lab, services int) (_ *Cluster, err error) {
	c := &Cluster{Lab: l}
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	for i := range c.Nodes {
		if c.Nodes[i], err = l.AddNode(fmt.Sprintf("node%d", i+1)); err != nil {
			return nil, err
		}
	}
	outside, errOutside := l.AddClient("outside")
	inside, errInside := c.Nodes[0].AddPod("inside")
	local, errLocal := c.Nodes[0].AddPod("local")
	remote, errRemote := c.Nodes[1].AddPod("remote")
	if err := errors.Join(errOutside, errInside, errLocal, errRemote, l.Announce(loadBalancers, c.Nodes[0])); err != nil {
		return nil, err
	}
	c.clients = [Paths]*lab.Sandbox{outside.Sandbox, outside.Sandbox, outside.Sandbox, inside.Sandbox}
	c.servers = [Paths]*lab.Pod{local, local, remote, local}
	for i, n := range c.Nodes {
		err := n.Do(func() (err error) {
			c.conntrack[i], err = netlink.NewHandle(unix.NETLINK_NETFILTER)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("open netlink of %s: %w", n.Name, err)
		}
	}
	for i := range services {
		c.add(i)
	}
	return c, nil
}

// Services are the addresses that a path can dial.
func (c *Cluster) Services(p Path) []netip.AddrPort { return c.services[p] }

// Server is where a path ends.
func (c *Cluster) Server(p Path) netip.AddrPort {
	return netip.AddrPortFrom(c.servers[p].Addr4, targetPort)
}

// add makes the i-th Service.
func (c *Cluster) add(i int) {
	path := Path(i) % Paths
	ip := nth(lab.ServicePrefix4, 256+i)
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: fmt.Sprintf("service-%d", i)},
		Spec: v1.ServiceSpec{Type: v1.ServiceTypeClusterIP, ClusterIP: ip.String(), ClusterIPs: []string{ip.String()},
			Ports: []v1.ServicePort{{Name: "http", Port: servicePort, Protocol: v1.ProtocolTCP}}},
	}
	to := netip.AddrPortFrom(ip, servicePort)
	switch path {
	case NodePortLocal, NodePortRemote:
		port := i / 2
		if port >= nodePorts {
			to = netip.AddrPort{}
			break
		}
		s.Spec.Type = v1.ServiceTypeNodePort
		s.Spec.Ports[0].NodePort = int32(firstNodePort + port)
		to = netip.AddrPortFrom(c.Nodes[0].Addr4, uint16(firstNodePort+port))
	case LoadBalancerLocal:
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Spec.AllocateLoadBalancerNodePorts = ptr.To(false)
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		to = netip.AddrPortFrom(nth(loadBalancers, i), servicePort)
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: to.Addr().String()}}
	}
	if to.IsValid() {
		c.services[path] = append(c.services[path], to)
	}
	pod := c.servers[path]
	c.Objects = append(c.Objects, s, &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: s.Name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](targetPort), Protocol: ptr.To(v1.ProtocolTCP)}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{pod.Addr4.String()}, NodeName: ptr.To(pod.Node.Name),
			Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)}}},
	})
}

// nth is the i-th address of a prefix of 16 bits.
func nth(p netip.Prefix, i int) netip.Addr {
	b := p.Addr().As4()
	b[2], b[3] = byte(i>>8), byte(i)
	return netip.AddrFrom4(b)
}

// Close releases the resources that the lab does not manage.
func (c *Cluster) Close() {
	for _, h := range c.conntrack {
		if h != nil {
			h.Close()
		}
	}
}

// forget deletes the nodes' conntrack entries. They would accumulate for two minutes, so
// results would depend on the duration of the measurement. The kernel also keeps the entries
// of all namespaces in one table, so variants would slow each other down.
func (c *Cluster) forget() error {
	for i, h := range c.conntrack {
		if err := h.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
			return fmt.Errorf("forget connections of %s: %w", c.Nodes[i].Name, err)
		}
	}
	return nil
}
