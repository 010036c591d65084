// SPDX-License-Identifier: Apache-2.0

package controller

import (
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/tandem-proxy/tandem/servicelb"
)

// trimPod keeps what hostPorts depend on. Most pods have none.
func trimPod(object any) (any, error) {
	p, ok := object.(*v1.Pod)
	if !ok {
		return object, nil
	}
	kept := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, ResourceVersion: p.ResourceVersion}}
	ports := servicelb.HostPortsOf(p)
	if len(ports) == 0 {
		return kept, nil
	}
	kept.Spec.NodeName, kept.Spec.Containers = p.Spec.NodeName, make([]v1.Container, 1)
	for _, port := range ports {
		kept.Spec.Containers[0].Ports = append(kept.Spec.Containers[0].Ports, v1.ContainerPort{HostPort: port.Port, HostIP: port.IP.String(), Protocol: port.Protocol})
	}
	return kept, nil
}

// watchPods has the controller look again once hostPorts may differ.
func (c *Controller) watchPods() {
	informer := c.factory.Core().V1().Pods().Informer()
	_ = informer.SetTransform(trimPod) // it has not started
	_ = informer.AddIndexers(cache.Indexers{byNode: func(object any) ([]string, error) {
		if p, ok := object.(*v1.Pod); ok && p.Spec.NodeName != "" {
			return []string{p.Spec.NodeName}, nil
		}
		return nil, nil
	}})
	has := func(object any) bool { p, ok := object.(*v1.Pod); return !ok || p.Spec.NodeName != "" }
	look := func(objects ...any) {
		for _, o := range objects {
			if has(o) {
				c.changed()
				return
			}
		}
	}
	_, _ = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { look(o) }, UpdateFunc: func(before, after any) { look(before, after) }, DeleteFunc: func(o any) { look(o) },
	})
	c.pods = informer.GetIndexer()
}

const byNode = "node"

// hostPorts implements servicelb.Objects.
func (c *Controller) hostPorts(node string) (list []servicelb.HostPort) {
	pods, _ := c.pods.ByIndex(byNode, node) // there is such an index
	for _, p := range pods {
		list = append(list, servicelb.HostPortsOf(p.(*v1.Pod))...)
	}
	return list
}
