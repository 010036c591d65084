// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"

	"github.com/tandem-proxy/tandem/test/golden"
)

// checkOptOuts checks that an account may list and watch pods and namespaces, and nothing else.
func checkOptOuts(t *testing.T, objects []runtime.Object, account string) {
	t.Helper()
	checkReads(t, objects, account, "pods", "namespaces")
}

// checkReads checks that an account may list and watch these resources of the core group, by a role of its own.
func checkReads(t *testing.T, objects []runtime.Object, account string, resources ...string) {
	t.Helper()
	role := find[*rbacv1.ClusterRole](t, objects)
	want := []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: resources, Verbs: []string{"list", "watch"}}}
	if d := cmp.Diff(want, role.Rules); d != "" {
		t.Errorf("rules (-want +got):\n%s", d)
	}
	bound := 0
	for _, o := range objects {
		if b, ok := o.(*rbacv1.ClusterRoleBinding); ok && b.RoleRef.Name == role.Name {
			bound++
			want := []rbacv1.Subject{{Kind: "ServiceAccount", Name: account, Namespace: "kube-system"}}
			if d := cmp.Diff(want, b.Subjects); d != "" || b.RoleRef.Kind != "ClusterRole" {
				t.Errorf("bound as %s to (-want +got):\n%s", b.RoleRef.Kind, d)
			}
		}
	}
	if bound != 1 {
		t.Errorf("role %s is bound %d times", role.Name, bound)
	}
}

// TestHostPorts: with hostPort, the chart lets the proxy read Pods.
func TestHostPorts(t *testing.T) {
	objects := decode(t, mustRender(t, map[string]any{"tandem": map[string]any{"hostPort": true}}))
	checkReads(t, objects, find[*v1.ServiceAccount](t, objects).Name, "pods")
	if conf := find[*v1.ConfigMap](t, objects).Data["config.conf"]; !strings.Contains(conf, "hostPort: true") {
		t.Errorf("the configuration does not have it:\n%s", conf)
	}
}

// TestOptOuts: the chart, kustomization and manifest for kubeadm let the proxy read Pods and Namespaces, if that
// is switched on.
func TestOptOuts(t *testing.T) {
	usual := mustRender(t, nil)
	for _, o := range decode(t, usual) {
		if role, ok := o.(*rbacv1.ClusterRole); ok {
			t.Errorf("the chart has role %s without being asked", role.Name)
		}
	}
	rbac := map[string]any{"create": true, "optOuts": true}
	text := mustRender(t, map[string]any{"rbac": rbac})
	checkOptOuts(t, decode(t, text), find[*v1.ServiceAccount](t, decode(t, text)).Name)
	var more strings.Builder
	for _, document := range strings.Split(text, "---\n") {
		if !strings.Contains(usual, document) {
			more.WriteString("---\n" + document)
		}
	}
	golden.Compare(t, "../../../deploy/kustomize/opt-outs/rbac.yaml", "# SPDX-License-Identifier: Apache-2.0\n# Rendered from the chart; 'go test -C test/deploy . -update' writes it.\n"+more.String())

	manifest, err := os.ReadFile("../../deploy/kubeadm/opt-outs.yaml")
	if err != nil {
		t.Fatal(err)
	}
	checkOptOuts(t, decode(t, string(manifest)), "kube-proxy")

	deployed, err := filepath.Abs("../../deploy/kustomize")
	if err != nil {
		t.Fatal(err)
	}
	overlay := t.TempDir()
	base, err := filepath.Rel(overlay, deployed)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(overlay, "kustomization.yaml"), []byte("resources: ["+base+"/example]\ncomponents: ["+base+"/opt-outs]\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), overlay)
	if err != nil {
		t.Fatal(err)
	}
	overlaid, err := built.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	checkOptOuts(t, decode(t, string(overlaid)), find[*v1.ServiceAccount](t, decode(t, string(overlaid))).Name)
}
