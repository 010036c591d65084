// SPDX-License-Identifier: Apache-2.0

package kubeadm

import (
	"net/http/httptest"
	"strings"
	"testing"
)

func TestConfig(t *testing.T) {
	if got := Config(""); strings.Count(got, "\nmode: \"\"\n") != 1 {
		t.Errorf("kubeadm's mode is not in\n%s", got)
	}
	if got := Config("ebpf"); strings.Count(got, "\nmode: ebpf\n") != 1 || strings.Contains(got, "\nmode: \"\"\n") {
		t.Errorf("the mode is not in\n%s", got)
	}
}

func TestNeeds(t *testing.T) {
	for request, want := range map[string]string{
		"GET /api/v1/services":                                         "list services",
		"GET /api/v1/services?watch=true":                              "watch services",
		"GET /api/v1/services?watch=1":                                 "watch services",
		"GET /api/v1/services?watch=false":                             "list services",
		"GET /api/v1/nodes/node1":                                      "get nodes",
		"GET /api/v1/nodes/node1?watch=true":                           "get nodes",
		"PATCH /api/v1/nodes/node1/status":                             "patch nodes/status",
		"GET /api/v1/namespaces":                                       "list namespaces",
		"GET /api/v1/namespaces/shop":                                  "get namespaces",
		"GET /api/v1/namespaces/shop/secrets":                          "list secrets",
		"GET /apis/discovery.k8s.io/v1/endpointslices?watch=true":      "watch endpointslices.discovery.k8s.io",
		"POST /apis/events.k8s.io/v1/namespaces/default/events":        "create events.events.k8s.io",
		"PATCH /apis/events.k8s.io/v1/namespaces/default/events/e?a=b": "patch events.events.k8s.io",
		"PUT /apis/events.k8s.io/v1/namespaces/default/events/e":       "update events.events.k8s.io",
		"DELETE /apis/events.k8s.io/v1/namespaces/default/events/e":    "delete events.events.k8s.io",
		"POST /api/v1/namespaces/default/events":                       "create events",
		"GET /version":                                                 "get /version",
		"GET /":                                                        "get /",
		"GET /apis/discovery.k8s.io/v1":                                "get /apis/discovery.k8s.io/v1",
	} {
		method, target, _ := strings.Cut(request, " ")
		if got := Needs(httptest.NewRequest(method, target, nil)); got != want {
			t.Errorf("%s needs %q, want %q", request, got, want)
		}
	}
}
