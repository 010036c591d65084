// SPDX-License-Identifier: Apache-2.0

package fakeapi

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/observe/events"
	"github.com/tandem-proxy/tandem/sources/apiserver"
)

// deadline bounds every wait; a test that passes never gets near it.
const deadline = 20 * time.Second

func serve(t *testing.T, objects ...Object) (*API, *apiserver.Client) {
	t.Helper()
	return serveAs(t, runtime.ContentTypeProtobuf, objects...)
}

func serveAs(t *testing.T, contentType string, objects ...Object) (*API, *apiserver.Client) {
	t.Helper()
	api := New(objects...)
	server := httptest.NewServer(api)
	t.Cleanup(func() {
		server.CloseClientConnections() // of watches, which Close waits for
		server.Close()
	})
	client, err := apiserver.NewClient(apiserver.ClientConfig{Master: server.URL, ContentType: contentType, AcceptContentTypes: contentType})
	if err != nil {
		t.Fatal(err)
	}
	return api, client
}

// inEachFormat runs a test in each that clients may ask for; lists are in JSON all the same.
func inEachFormat(t *testing.T, test func(t *testing.T, contentType string)) {
	for _, contentType := range []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf} {
		t.Run(contentType, func(t *testing.T) { test(t, contentType) })
	}
}

func service(name string, labels map[string]string) *v1.Service {
	return &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, Labels: labels}}
}

// record writes down what an informer tells its handlers.
func record(ctx context.Context, t *testing.T, client *apiserver.Client, labelSelector string) <-chan string {
	t.Helper()
	told := make(chan string, 100)
	note := func(what string, o any) { told <- what + " " + o.(*v1.Service).Name }
	services := client.Services()
	informer := cache.NewSharedIndexInformer(cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = labelSelector
			return services.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = labelSelector
			return services.Watch(ctx, o)
		},
	}, client), &v1.Service{}, 0, nil)
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { note("add", o) }, UpdateFunc: func(_, o any) { note("update", o) }, DeleteFunc: func(o any) { note("delete", o) },
	})
	if err != nil {
		t.Fatal(err)
	}
	go informer.RunWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		t.Fatal("the informer does not sync")
	}
	return told
}

func expect(t *testing.T, told <-chan string, want ...string) {
	t.Helper()
	for _, line := range want {
		select {
		case got := <-told:
			if got != line {
				t.Fatalf("told %q, want %q", got, line)
			}
		case <-time.After(deadline):
			t.Fatalf("timeout while waiting for %q", line)
		}
	}
}

// TestInformer: an informer gets the changes of the objects that it selects, and no others.
func TestInformer(t *testing.T) { inEachFormat(t, testInformer) }

func testInformer(t *testing.T, contentType string) {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	hidden := map[string]string{"hidden": ""}
	api, client := serveAs(t, contentType, service("a", nil), service("b", hidden))
	told := record(ctx, t, client, "!hidden")
	expect(t, told, "add a")

	api.Put(service("b", hidden))
	api.Put(service("c", nil))
	api.Put(service("c", nil))
	api.Put(service("b", nil))
	expect(t, told, "add c", "update c", "add b")
	api.Put(service("b", hidden))
	api.Delete(service("c", nil))
	api.Delete(service("b", nil))
	api.Put(service("d", nil))
	expect(t, told, "delete b", "delete c", "add d")
}

// TestListAndWatch: the way of clients that do not stream lists.
func TestListAndWatch(t *testing.T) { inEachFormat(t, testListAndWatch) }

func testListAndWatch(t *testing.T, contentType string) {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	api, client := serveAs(t, contentType, service("a", nil), service("b", nil))
	services := client.Services()

	one := metav1.ListOptions{FieldSelector: "metadata.name=b"}
	listed, err := services.List(ctx, one)
	if err != nil {
		t.Fatal(err)
	}
	list := listed.(*v1.ServiceList)
	if len(list.Items) != 1 || list.Items[0].Name != "b" {
		t.Fatalf("listed %v", list.Items)
	}
	one.ResourceVersion = list.ResourceVersion
	w, err := services.Watch(ctx, one)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	api.Delete(service("a", nil), service("b", nil))
	e := <-w.ResultChan()
	if gone, ok := e.Object.(*v1.Service); !ok || e.Type != watch.Deleted || gone.Name != "b" || gone.ResourceVersion == list.Items[0].ResourceVersion {
		t.Errorf("watched %v %v", e.Type, e.Object)
	}
}

// TestStreamedList: where the beginning ends is marked. Informers would do without, by
// listing.
func TestStreamedList(t *testing.T) { inEachFormat(t, testStreamedList) }

func testStreamedList(t *testing.T, contentType string) {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	_, client := serveAs(t, contentType, service("a", nil), service("b", nil))
	w, err := client.Services().Watch(ctx, metav1.ListOptions{
		SendInitialEvents: ptr.To(true), ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan, AllowWatchBookmarks: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	var got []string
	for len(got) < 3 {
		e := <-w.ResultChan()
		s, ok := e.Object.(*v1.Service)
		if !ok {
			t.Fatalf("watched %v %v", e.Type, e.Object)
		}
		got = append(got, fmt.Sprint(e.Type, " ", s.Name, s.Annotations[metav1.InitialEventsAnnotationKey]))
	}
	if diff := cmp.Diff([]string{"ADDED a", "ADDED b", "BOOKMARK true"}, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// TestOtherRequests: kinds without objects are there, and what is not served is not found.
func TestOtherRequests(t *testing.T) {
	api, client := serve(t)
	ctx := context.Background()
	if list, err := client.ServiceCIDRs().List(ctx, metav1.ListOptions{}); err != nil || len(list.(*networkingv1.ServiceCIDRList).Items) != 0 {
		t.Errorf("ServiceCIDRs: %v, %v", list, err)
	}
	answer := httptest.NewRecorder()
	api.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/api/v1/secrets", nil))
	if answer.Code != http.StatusNotFound || !strings.Contains(answer.Body.String(), "/api/v1/secrets is not served") {
		t.Errorf("list Secrets: %d %s", answer.Code, answer.Body)
	}
}

// TestEvents: what a client's recorder writes is kept, and what it says again is a series.
func TestEvents(t *testing.T) {
	api, client := serve(t)
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	recorder := events.NewWriter("test", client.Events())
	go recorder.Run(ctx)
	node := &v1.ObjectReference{Kind: "Node", Name: "node1"}
	await := func(want string) {
		t.Helper()
		var got string
		for got != want {
			if ctx.Err() != nil {
				t.Fatalf("kept %q, want %q", got, want)
			}
			time.Sleep(time.Millisecond)
			var list []string
			for _, e := range api.Events() {
				text := e.Reason + " " + e.Regarding.Name + " " + e.Note
				if e.Series != nil {
					text += fmt.Sprint(" ", e.Series.Count)
				}
				list = append(list, text)
			}
			got = strings.Join(list, ", ")
		}
	}
	recorder.Eventf(node, v1.EventTypeNormal, "One", "Do", "said %d", 1)
	await("One node1 said 1")
	recorder.Eventf(node, v1.EventTypeNormal, "One", "Do", "said %d", 2)
	await("One node1 said 1 2")
	recorder.Eventf(node, v1.EventTypeNormal, "Two", "Do", "said %d", 3)
	await("One node1 said 1 2, Two node1 said 3")
}

// TestFormats: a watch is in the format that was asked for.
func TestFormats(t *testing.T) {
	server := httptest.NewServer(New(service("a", nil)))
	defer server.Close()
	for accept, want := range map[string]string{
		"": runtime.ContentTypeJSON, runtime.ContentTypeJSON: runtime.ContentTypeJSON,
		runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON: protobufStream, // as we ask
		runtime.ContentTypeProtobuf + ", */*":                       protobufStream, // as upstream does
		runtime.ContentTypeJSON + "," + runtime.ContentTypeProtobuf: runtime.ContentTypeJSON,
		"*/*": runtime.ContentTypeJSON,
	} {
		ctx, cancel := context.WithTimeout(t.Context(), deadline)
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+"/api/v1/services?watch=true", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Accept", accept)
		answer, err := server.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		if got := answer.Header.Get("Content-Type"); got != want {
			t.Errorf("who accepts %q is answered in %q, want %q", accept, got, want)
		}
		cancel()
		_ = answer.Body.Close()
	}
}
