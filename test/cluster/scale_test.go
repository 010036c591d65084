// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/test/lab"
)

// crowd makes Services without traffic, with the given number of endpoints each.
func (c *cluster) crowd(services, endpoints int) {
	c.tb.Helper()
	began := time.Now()
	g, ctx := errgroup.WithContext(c.tb.Context())
	g.SetLimit(16)
	for i := range services {
		g.Go(func() error {
			name := fmt.Sprintf("crowd-%d", i)
			_, err := c.client.CoreV1().Services(namespace).Create(ctx, &v1.Service{
				ObjectMeta: metav1.ObjectMeta{Name: name},
				Spec:       v1.ServiceSpec{Ports: []v1.ServicePort{{Name: "tcp", Port: 80}}}, // no selector: this test writes the slice
			}, metav1.CreateOptions{})
			if err != nil {
				return err
			}
			slice := sliceOf(name)
			for j := range endpoints {
				n := i*endpoints + j
				slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
					Addresses: []string{fmt.Sprintf("10.%d.%d.%d", 200+n>>16, n>>8&255, n&255)}, NodeName: ptr.To(fmt.Sprintf("far%d", n%100)),
				})
			}
			_, err = c.client.DiscoveryV1().EndpointSlices(namespace).Create(ctx, slice, metav1.CreateOptions{})
			return err
		})
	}
	if err := g.Wait(); err != nil {
		c.tb.Fatal(err)
	}
	c.tb.Logf("%d Services of %d endpoints were written in %v", services, endpoints, time.Since(began).Round(time.Millisecond))
}

// sliceOf is the slice of a Service without a selector.
func sliceOf(service string, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: service, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("tcp"), Port: ptr.To[int32](targetPort), Protocol: ptr.To(v1.ProtocolTCP)}},
		Endpoints:   endpoints,
	}
}

// TestManyServices: 5,000 Services exist when kube-proxy starts. It serves all of them, and
// applies changes.
func TestManyServices(t *testing.T) {
	const services = 5000
	c := newCluster(t, 1, inMode("ebpf"))
	n := c.nodes[0]
	inside := []*lab.Sandbox{n.Sandbox, n.Pod("shell").Sandbox}
	web1 := c.run(n, "web", "web-1")
	to := vip(c.expose("web"), 0)
	c.crowd(services, 2)
	began := time.Now()
	p := c.startAll()[0]
	t.Logf("all were programmed %v after the start", time.Since(began).Round(time.Millisecond))
	metrics, err := p.get(10249, "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	frontends := sample(t, metrics, `tandem_map_entries{map="frontends"}`)
	if frontends < services+3 { // those of web, and of the API server
		t.Errorf("%v frontends, want those of %d Services", frontends, services)
	}
	c.answer("among many", to, inside, web1)
	web2 := c.run(n, "web", "web-2")
	c.answer("a change among many", to, inside, web1, web2)
	c.nothingRefused()
}

// sample returns the value of a metric.
func sample(tb testing.TB, metrics, name string) (value float64) {
	tb.Helper()
	for line := range strings.Lines(metrics) {
		if rest, ok := strings.CutPrefix(line, name+" "); ok {
			value, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
			if err != nil {
				tb.Fatal(err)
			}
			return value
		}
	}
	tb.Fatalf("there is no %s", name)
	return 0
}
