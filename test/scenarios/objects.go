// SPDX-License-Identifier: Apache-2.0

package scenarios

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/tandem-proxy/tandem/proxier"
)

// Objects decodes a file of the scenario: *v1.Service,
// *discoveryv1.EndpointSlice, *v1.Node and *v1.Pod.
func (s *Scenario) Objects(file string) ([]metav1.Object, error) {
	text, ok := s.File(file)
	if !ok {
		return nil, fmt.Errorf("there is no file %s", file)
	}
	var list []metav1.Object
	for i, doc := range strings.Split("\n"+text, "\n---\n") {
		o, err := s.object([]byte(doc))
		if err != nil {
			return nil, fmt.Errorf("%s, object %d: %w", file, i+1, err)
		}
		list = append(list, o)
	}
	return list, nil
}

func (s *Scenario) object(doc []byte) (metav1.Object, error) {
	doc, err := yaml.YAMLToJSONStrict(doc)
	if err != nil {
		return nil, err
	}
	var t metav1.TypeMeta
	if err := kjson.UnmarshalCaseSensitivePreserveInts(doc, &t); err != nil {
		return nil, err
	}
	var o metav1.Object
	switch t.APIVersion + " " + t.Kind {
	case "v1 Service":
		o = &v1.Service{}
	case "discovery.k8s.io/v1 EndpointSlice":
		o = &discoveryv1.EndpointSlice{}
	case "v1 Node":
		o = &v1.Node{}
	case "v1 Pod":
		o = &v1.Pod{}
	default:
		return nil, fmt.Errorf("%q is not Service, EndpointSlice, Node or Pod", t.APIVersion+" "+t.Kind)
	}
	unknown, err := kjson.UnmarshalStrict(doc, o)
	if err := errors.Join(append(unknown, err)...); err != nil {
		return nil, err
	}
	if o.GetName() == "" {
		return nil, fmt.Errorf("it has no name")
	}
	if n, ok := o.(*v1.Node); ok {
		return n, s.completeNode(n)
	}
	if service, ok := o.(*v1.Service); ok && service.Spec.ClusterIP == "" && len(service.Spec.ClusterIPs) > 0 {
		service.Spec.ClusterIP = service.Spec.ClusterIPs[0]
	}
	o.SetNamespace(cmp.Or(o.GetNamespace(), metav1.NamespaceDefault))
	if p, ok := o.(*v1.Pod); ok {
		return p, s.completePod(p)
	}
	return o, nil
}

// NodeObject returns the Node object of a node at the start of the scenario.
func (s *Scenario) NodeObject(name string) (*v1.Node, error) {
	n := &v1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: name}}
	if i := s.node(name); i >= 0 && s.Nodes[i].Zone != "" {
		n.Labels = map[string]string{v1.LabelTopologyZone: s.Nodes[i].Zone}
	}
	return n, s.completeNode(n)
}

func (s *Scenario) completeNode(n *v1.Node) error {
	if s.node(n.Name) < 0 {
		return fmt.Errorf("there is no node %s", n.Name)
	}
	if len(n.Status.Addresses) == 0 {
		for family := range proxier.Families {
			n.Status.Addresses = append(n.Status.Addresses, v1.NodeAddress{Type: v1.NodeInternalIP, Address: s.Addr(n.Name, family).String()})
		}
	}
	if len(n.Spec.PodCIDRs) == 0 {
		n.Spec.PodCIDRs = []string{s.PodCIDR(n.Name, proxier.IPv4).String(), s.PodCIDR(n.Name, proxier.IPv6).String()}
	}
	return nil
}

// completePod adds what kubelet and the scheduler know of a declared pod.
func (s *Scenario) completePod(p *v1.Pod) error {
	i := slices.IndexFunc(s.Pods, func(pod Pod) bool { return pod.Name == p.Name })
	if i < 0 {
		return fmt.Errorf("there is no pod %s", p.Name)
	}
	p.Spec.NodeName = s.Pods[i].Node
	p.Status.Phase = cmp.Or(p.Status.Phase, v1.PodRunning)
	for family := range proxier.Families {
		p.Status.PodIPs = append(p.Status.PodIPs, v1.PodIP{IP: s.Addr(p.Name, family).String()})
	}
	return nil
}

// WithoutPods returns the scenarios that apply no Pod objects, which upstream's kube-proxy does not read.
func WithoutPods() ([]*Scenario, error) {
	list, err := All()
	return slices.DeleteFunc(list, func(s *Scenario) bool {
		return slices.ContainsFunc(s.appliedFiles(), func(file string) bool {
			objects, err := s.Objects(file)
			return err == nil && slices.ContainsFunc(objects, func(o metav1.Object) bool { _, is := o.(*v1.Pod); return is })
		})
	}), err
}

// AddObjects adds a file of objects for Apply.
func (s *Scenario) AddObjects(file string, objects ...metav1.Object) error {
	var b strings.Builder
	for i, o := range objects {
		if i > 0 {
			b.WriteString("---\n")
		}
		text, err := yaml.Marshal(o)
		if err != nil {
			return fmt.Errorf("write %s: %w", file, err)
		}
		b.Write(text)
	}
	s.Files = append(s.Files, File{file, b.String()})
	return nil
}

// Listener is a port on which a node or pod must answer.
type Listener struct {
	Name     string // of the node or pod
	Protocol proxier.Protocol
	Port     uint16
}

// Listeners returns the listeners for the EndpointSlices and Pods of all steps, in the order
// of the script, each once.
func (s *Scenario) Listeners() ([]Listener, error) {
	var list []Listener
	seen := map[Listener]bool{}
	add := func(name string, text v1.Protocol, port int32) {
		protocol, err := proxier.ParseProtocol(text)
		l := Listener{name, protocol, uint16(port)}
		if port >= 1 && port <= 65535 && err == nil && name != "" && !seen[l] {
			seen[l] = true
			list = append(list, l)
		}
	}
	for _, f := range s.appliedFiles() {
		objects, err := s.Objects(f)
		if err != nil {
			return nil, err
		}
		for _, o := range objects {
			switch o := o.(type) {
			case *v1.Pod:
				for _, c := range o.Spec.Containers {
					for _, p := range c.Ports {
						add(o.Name, p.Protocol, p.ContainerPort)
					}
				}
			case *discoveryv1.EndpointSlice:
				for _, p := range o.Ports {
					for _, e := range o.Endpoints {
						for _, a := range e.Addresses {
							add(s.owner(a), protocolOf(p), ptr.Deref(p.Port, 0))
						}
					}
				}
			}
		}
	}
	return list, nil
}

func protocolOf(p discoveryv1.EndpointPort) v1.Protocol {
	if p.Protocol == nil {
		return v1.ProtocolTCP
	}
	return *p.Protocol
}

func (s *Scenario) appliedFiles() (list []string) {
	for i := range s.Steps {
		if a, ok := s.Steps[i].Command.(Apply); ok {
			list = append(list, a.File)
		}
	}
	return list
}

// owner returns the node, pod or client that owns the address by the address plan; empty
// for none.
func (s *Scenario) owner(addr string) string {
	if a, err := proxier.ParseAddr(addr); err == nil {
		addr = a.String()
	}
	for family := range proxier.Families {
		for _, n := range s.Nodes {
			if s.Addr(n.Name, family).String() == addr || s.gateway(n.Name, family).String() == addr {
				return n.Name
			}
		}
		for _, p := range s.Pods {
			if s.Addr(p.Name, family).String() == addr {
				return p.Name
			}
		}
		for _, c := range s.Clients {
			if s.Addr(c, family).String() == addr {
				return c
			}
		}
	}
	return ""
}

// ObjectChange is a change of one object: Old is nil for a new one, New for
// a deleted one. All changes of a step take effect together.
type ObjectChange struct{ Old, New metav1.Object }

// Handler is what a proxier has.
type Handler interface {
	proxier.Handler
	OnPod(*v1.Pod)
	OnPodDelete(*v1.Pod)
}

// Feed passes a change to the event handler of one node's proxy.
func Feed(h Handler, node string, c ObjectChange) {
	object := c.New
	if object == nil {
		object = c.Old
	}
	switch object := object.(type) {
	case *v1.Service:
		before, _ := c.Old.(*v1.Service)
		after, _ := c.New.(*v1.Service)
		switch {
		case after == nil:
			h.OnServiceDelete(before)
		case before == nil:
			h.OnServiceAdd(after)
		default:
			h.OnServiceUpdate(before, after)
		}
	case *discoveryv1.EndpointSlice:
		before, _ := c.Old.(*discoveryv1.EndpointSlice)
		after, _ := c.New.(*discoveryv1.EndpointSlice)
		switch {
		case after == nil:
			h.OnEndpointSliceDelete(before)
		case before == nil:
			h.OnEndpointSliceAdd(after)
		default:
			h.OnEndpointSliceUpdate(before, after)
		}
	case *v1.Pod:
		switch {
		case object.Spec.NodeName != node:
		case c.New == nil:
			h.OnPodDelete(object)
		default:
			h.OnPod(object)
		}
	case *v1.Node:
		if object.GetName() != node {
			return
		}
		before, _ := c.Old.(*v1.Node)
		after, _ := c.New.(*v1.Node)
		switch {
		case after == nil:
			h.OnNodeDelete(before)
		case before == nil:
			h.OnNodeAdd(after)
		default:
			h.OnNodeUpdate(before, after)
		}
	}
}
