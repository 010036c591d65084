// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-proxy/tandem/test/kubeadm"
)

// TestKubeadm: package kubeadm, which other tests use, matches what kubeadm's own code writes.
func TestKubeadm(t *testing.T) {
	c := newCluster(t, 0, nil)
	m, err := proxyConfigMap(t.Context(), c.client)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		kubeadm.ConfigFile:     strings.Replace(kubeadm.Config(""), "maxPerCore: null", "maxPerCore: 0", 1), // the edit of newCluster
		kubeadm.KubeconfigFile: kubeadm.Kubeconfig(c.plane.url()),
	}
	for name := range want {
		want[name] = strings.TrimSuffix(want[name], "\n")
	}
	if d := cmp.Diff(want, m.Data); d != "" {
		t.Errorf("the ConfigMap (-here +kubeadm's):\n%s", d)
	}

	role, err := c.client.RbacV1().ClusterRoles().Get(t.Context(), "system:node-proxier", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var allowed []string
	for _, rule := range role.Rules {
		for _, verb := range rule.Verbs {
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					allowed = append(allowed, kubeadm.Permission(verb, group, resource, ""))
				}
			}
		}
	}
	for _, permission := range kubeadm.Allowed {
		if !slices.Contains(allowed, permission) {
			t.Errorf("%s has no permission to %s, only %q", role.Name, permission, allowed)
		}
	}
}
