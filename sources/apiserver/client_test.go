// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
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
