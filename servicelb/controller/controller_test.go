// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"

	"github.com/tandem-proxy/tandem/servicelb"
)

// patience is for busy machines.
const patience = 30 * time.Second

func await(t *testing.T, what string, condition func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := condition()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func newNode(name, addr string) *v1.Node {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: addr}}
	n.Status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue}}
	return n
}

func newService(name string, port int32) *v1.Service {
	s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)}}
	s.Spec.Type, s.Spec.LoadBalancerClass = v1.ServiceTypeLoadBalancer, new(servicelb.Class)
	s.Spec.IPFamilies, s.Spec.Ports = []v1.IPFamily{v1.IPv4Protocol}, []v1.ServicePort{{Port: port, Protocol: v1.ProtocolTCP}}
	return s
}

// world is a controller at a fake API server.
type world struct {
	t      *testing.T
	client *fake.Clientset
	events chan string
	*Controller
}

func start(t *testing.T, o Options, objects ...runtime.Object) *world {
	t.Helper()
	recorder := record.NewFakeRecorder(100)
	w := &world{t: t, client: fake.NewClientset(objects...), events: recorder.Events}
	w.Controller = New(w.client, recorder, o)
	w.listeners.dial = func(context.Context, netip.AddrPort) bool { return false }
	return w
}

func (w *world) run() {
	ctx, cancel := context.WithCancel(w.t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := w.Run(ctx); err != nil {
			w.t.Error(err)
		}
	})
	w.t.Cleanup(func() { cancel(); wg.Wait() })
}

// has waits until a Service has these addresses.
func (w *world) has(name string, want ...string) {
	w.t.Helper()
	await(w.t, name+" to have "+strings.Join(want, ", "), func() error {
		s, err := w.client.CoreV1().Services("ns").Get(w.t.Context(), name, metav1.GetOptions{})
		if err == nil && (!slices.Equal(texts(s.Status.LoadBalancer.Ingress), want) || len(s.Status.Conditions) == 0) {
			err = fmt.Errorf("it has %v, %v", texts(s.Status.LoadBalancer.Ingress), s.Status.Conditions)
		}
		return err
	})
}

// says waits for an Event.
func (w *world) says(want string) {
	w.t.Helper()
	var others []string
	await(w.t, "an Event: "+want, func() error {
		for {
			select {
			case e := <-w.events:
				if e == want {
					return nil
				}
				others = append(others, e)
			default:
				return fmt.Errorf("there are %q", others)
			}
		}
	})
}

// TestController: a Service gets the addresses of nodes, another one only where the port is free, and without a change nothing is written.
func TestController(t *testing.T) {
	a, b := newService("a", 80), newService("b", 80)
	w := start(t, Options{}, newNode("n1", "10.0.0.1"), newNode("n2", "10.0.0.2"), a, b)
	w.run()
	w.has("a", "10.0.0.1", "10.0.0.2")
	w.has("b")
	await(t, "an Event", func() error {
		select {
		case e := <-w.events:
			if strings.Contains(e, "PortTaken") && strings.Contains(e, "ns/a") {
				return nil
			}
			return errors.New(e)
		default:
			return errors.New("none")
		}
	})
	writes := len(w.client.Actions())
	w.changed()
	w.changed()
	await(t, "another look", func() error { // with no write before it
		if len(w.wake) > 0 {
			return errors.New("it is still to be looked")
		}
		return nil
	})
	if after := len(w.client.Actions()); after != writes {
		// Watches and reads by the test itself are actions too.
		for _, action := range w.client.Actions()[writes:] {
			if action.GetVerb() == "update" {
				t.Errorf("written without a change: %v", action)
			}
		}
	}
	if err := w.client.CoreV1().Services("ns").Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.has("b", "10.0.0.1", "10.0.0.2")
	n2 := newNode("n2", "10.0.0.2")
	n2.Status.Conditions[0].Status = v1.ConditionUnknown
	if _, err := w.client.CoreV1().Nodes().Update(t.Context(), n2, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.has("b", "10.0.0.1")
}

// TestListener: a Service gets no address where a process of the host listens, and gets it once that has ended.
func TestListener(t *testing.T) {
	s := newService("a", 80)
	w := start(t, Options{}, newNode("n1", "10.0.0.1"), newNode("n2", "10.0.0.2"), s)
	var gone atomic.Bool
	w.listeners.dial = func(_ context.Context, to netip.AddrPort) bool {
		return to == netip.MustParseAddrPort("10.0.0.1:80") && !gone.Load()
	}
	w.run()
	w.has("a", "10.0.0.2")
	gone.Store(true)
	w.has("a", "10.0.0.1", "10.0.0.2")
}

// TestListenerShadowed: a Service that is to have a port all the same gets it, and an Event names the listener.
func TestListenerShadowed(t *testing.T) {
	s := newService("a", 80)
	s.Annotations = map[string]string{servicelb.AnnotationListeners: "warn"}
	w := start(t, Options{}, newNode("n1", "10.0.0.1"), s)
	w.listeners.dial = func(context.Context, netip.AddrPort) bool { return true }
	w.run()
	w.has("a", "10.0.0.1")
	w.says("Warning HostListens a process of the host listens on 10.0.0.1:80/TCP, and gets no connections from outside there")
}

// TestFinalizers: those of K3s' controller do not keep a Service that is deleted.
func TestFinalizers(t *testing.T) {
	s := newService("a", 80)
	s.Finalizers = append([]string{"example.com/other"}, servicelb.Finalizers...)
	s.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	w := start(t, Options{}, newNode("n1", "10.0.0.1"), s)
	w.run()
	await(t, "the finalizers to go", func() error {
		s, err := w.client.CoreV1().Services("ns").Get(t.Context(), "a", metav1.GetOptions{})
		if err == nil && !slices.Equal(s.Finalizers, []string{"example.com/other"}) {
			err = fmt.Errorf("%v", s.Finalizers)
		}
		return err
	})
}

// BenchmarkDecide is the time to decide about 1,000 Services on 50 nodes, which every change takes.
func BenchmarkDecide(b *testing.B) {
	var o servicelb.Objects
	for i := range 50 {
		o.Nodes = append(o.Nodes, newNode(fmt.Sprintf("n%d", i), fmt.Sprintf("10.0.0.%d", i)))
	}
	for i := range 1000 {
		s := newService(fmt.Sprintf("s%d", i), int32(10000+i))
		o.Services = append(o.Services, s)
	}
	for b.Loop() {
		servicelb.Decide(o, servicelb.Options{})
	}
}

// TestTakesOver: a controller that takes over from another one knows of no node at first. It withdraws no address.
func TestTakesOver(t *testing.T) {
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		time.Sleep(50 * time.Millisecond) // as over a network
	}))
	server.Listener = l
	server.Start()
	t.Cleanup(server.Close)
	s := newService("a", 80)
	s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "127.0.0.1"}, {IP: "127.0.0.2"}}
	w := start(t, Options{HealthPort: uint16(l.Addr().(*net.TCPAddr).Port)}, newNode("n1", "127.0.0.1"), newNode("n2", "127.0.0.2"), s)
	w.client.PrependReactor("*", "services", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if u, ok := action.(clienttesting.UpdateAction); ok {
			if s, ok := u.GetObject().(*v1.Service); ok && len(s.Status.LoadBalancer.Ingress) < 2 {
				t.Errorf("an address was withdrawn: %v", texts(s.Status.LoadBalancer.Ingress))
			}
		}
		return false, nil, nil
	})
	w.run()
	w.has("a", "127.0.0.1", "127.0.0.2")
}
