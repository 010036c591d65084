// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"io"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

const kubeconfig = `
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://192.0.2.1:6443"}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
users: [{name: u, user: {token: t}}]
current-context: x
`

func TestClientConfig(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	// Must not be consulted: only the explicit path counts.
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "other"))

	tests := []struct {
		name                      string
		cfg                       ClientConfig
		host, contentType, accept string
		qps                       float32
		burst                     int
	}{
		{
			name: "kubeconfig and defaults", cfg: ClientConfig{Kubeconfig: path},
			host: "https://192.0.2.1:6443", contentType: "application/vnd.kubernetes.protobuf",
			accept: "application/vnd.kubernetes.protobuf,application/json", qps: 5, burst: 10,
		},
		{
			name: "master wins over kubeconfig", cfg: ClientConfig{Kubeconfig: path, Master: "https://192.0.2.2"},
			host: "https://192.0.2.2", contentType: "application/vnd.kubernetes.protobuf",
			accept: "application/vnd.kubernetes.protobuf,application/json", qps: 5, burst: 10,
		},
		{
			name: "master alone, all set",
			cfg: ClientConfig{
				Master: "http://192.0.2.3:8080", ContentType: "application/json", AcceptContentTypes: "application/json", QPS: 50, Burst: 100,
			},
			host: "http://192.0.2.3:8080", contentType: "application/json", accept: "application/json", qps: 50, burst: 100,
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			c, err := restConfigFor(test.cfg)
			if err != nil {
				t.Fatal(err)
			}
			if c.Host != test.host || c.ContentType != test.contentType || c.AcceptContentTypes != test.accept || c.QPS != test.qps || c.Burst != test.burst {
				t.Errorf("host %q, content type %q, accept %q, qps %v, burst %d", c.Host, c.ContentType, c.AcceptContentTypes, c.QPS, c.Burst)
			}
			if !strings.HasPrefix(c.UserAgent, "kube-proxy/") {
				t.Errorf("user agent %q", c.UserAgent)
			}
			if _, err := NewClient(test.cfg); err != nil {
				t.Errorf("NewClient: %v", err)
			}
		})
	}
}

func TestClientConfigErrors(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	missing := filepath.Join(t.TempDir(), "missing")
	if _, err := NewClient(ClientConfig{Kubeconfig: missing}); err == nil || !strings.Contains(err.Error(), missing) {
		t.Errorf("missing kubeconfig: %v", err)
	}
	if _, err := NewClient(ClientConfig{}); err == nil || !strings.Contains(err.Error(), "in-cluster") {
		t.Errorf("outside a cluster: %v", err)
	}
}

// roundTrips is a transport that answers at once.
type roundTrips func(*http.Request) *http.Response

func (f roundTrips) RoundTrip(r *http.Request) (*http.Response, error) { return f(r), nil }

// Many Events do not delay a list, nor many lists an Event. A burst of Events is written at once, and what comes after it at the rate of
// the client.
func TestEventLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kinds := map[string]string{
			"services": `{"kind":"ServiceList","apiVersion":"v1","items":[]}`,
			"events":   `{"kind":"Event","apiVersion":"events.k8s.io/v1","metadata":{"name":"e","namespace":"default"}}`,
		}
		c, err := clientFor(&rest.Config{
			Host: "http://192.0.2.1", QPS: DefaultQPS, Burst: DefaultBurst,
			Transport: roundTrips(func(r *http.Request) *http.Response {
				return &http.Response{
					StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}},
					Body: io.NopCloser(strings.NewReader(kinds[path.Base(r.URL.Path)])), Request: r,
				}
			}),
		})
		if err != nil {
			t.Fatal(err)
		}
		list := func() error {
			_, err := c.Services().List(t.Context(), metav1.ListOptions{})
			return err
		}
		write := func() error {
			return c.Events().Create(t.Context(), &eventsv1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "e"}})
		}
		var requests sync.WaitGroup
		took := func(n int, what func() error) time.Duration {
			began := time.Now()
			for range n {
				requests.Go(func() {
					if err := what(); err != nil {
						t.Error(err)
					}
				})
			}
			requests.Wait()
			return time.Since(began)
		}
		// behind returns how long one request takes while many others wait.
		behind := func(n int, others, one func() error) (waited, all time.Duration) {
			began, done := time.Now(), make(chan struct{})
			go func() { took(n, others); close(done) }()
			synctest.Wait()
			if err := one(); err != nil {
				t.Error(err)
			}
			waited = time.Since(began)
			<-done
			return waited, time.Since(began).Round(time.Millisecond) // the limiter has floating-point tokens
		}
		if d := took(eventBurst, write); d != 0 {
			t.Errorf("%d Events took %s", eventBurst, d)
		}
		if waited, all := behind(50, write, list); waited != 0 || all != 10*time.Second {
			t.Errorf("a list took %s while 50 more Events took %s, want 0 and 10s", waited, all)
		}
		time.Sleep(time.Minute) // both limits are whole again
		if waited, all := behind(50, list, write); waited != 0 || all != 8*time.Second {
			t.Errorf("an Event took %s while 50 lists took %s, want 0 and 8s", waited, all)
		}
	})
}
