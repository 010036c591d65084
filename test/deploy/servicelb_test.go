// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/tandem-proxy/tandem/test/golden"
)

// TestServiceLB: the chart has the controller of ServiceLB if that is switched on, with the rights that test/cluster tests it with, and
// without any on the host.
func TestServiceLB(t *testing.T) {
	usual := mustRender(t, nil)
	if strings.Contains(usual, "servicelb") {
		t.Error("the chart has ServiceLB without being asked")
	}
	text := mustRender(t, map[string]any{"serviceLB": map[string]any{"enabled": true, "defaultClass": true, "replicas": 2, "extraArgs": []any{"--addresses-per-node"}}})
	objects := decode(t, text)
	d := find[*appsv1.Deployment](t, objects)
	c := &d.Spec.Template.Spec.Containers[0]
	if s := c.SecurityContext; d.Spec.Template.Spec.HostNetwork || s == nil || *s.AllowPrivilegeEscalation || !*s.RunAsNonRoot || len(s.Capabilities.Drop) != 1 {
		t.Errorf("the controller may do more than it needs: %+v", d.Spec.Template.Spec)
	}
	if role := find[*rbacv1.Role](t, objects); len(role.Rules) != 2 {
		t.Errorf("rules %v", role.Rules)
	}
	var more strings.Builder
	for _, document := range strings.Split(text, "---\n") {
		if !strings.Contains(usual, document) {
			more.WriteString("---\n" + document)
		}
	}
	golden.Compare(t, "servicelb.golden", more.String())
}
