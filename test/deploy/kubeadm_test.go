// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"sigs.k8s.io/yaml"
)

// kubeadmDaemonSet is the DaemonSet of kubeadm, with the fields that matter to a patch.
func kubeadmDaemonSet() *appsv1.DaemonSet {
	privileged := true
	return &appsv1.DaemonSet{
		TypeMeta:   metav1.TypeMeta{APIVersion: "apps/v1", Kind: "DaemonSet"},
		ObjectMeta: metav1.ObjectMeta{Name: "kube-proxy", Namespace: metav1.NamespaceSystem},
		Spec: appsv1.DaemonSetSpec{Template: v1.PodTemplateSpec{Spec: v1.PodSpec{
			HostNetwork: true,
			Containers: []v1.Container{{
				Name: "kube-proxy", Image: "upstream",
				Command:         []string{"/usr/local/bin/kube-proxy", "--config=/var/lib/kube-proxy/config.conf", "--hostname-override=$(NODE_NAME)"},
				SecurityContext: &v1.SecurityContext{Privileged: &privileged},
				VolumeMounts:    []v1.VolumeMount{{Name: "kube-proxy", MountPath: "/var/lib/kube-proxy"}, {Name: "xtables-lock", MountPath: "/run/xtables.lock"}, {Name: "lib-modules", MountPath: "/lib/modules", ReadOnly: true}},
			}},
		}}},
	}
}

// The patch changes the image and adds a flag, and nothing else.
func TestKubeadmPatch(t *testing.T) {
	text, err := os.ReadFile("../../deploy/kubeadm/kubeproxydaemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(text, &appsv1.DaemonSet{}); err != nil {
		t.Error(err)
	}
	patch, err := yaml.YAMLToJSON(text)
	if err != nil {
		t.Fatal(err)
	}
	before, err := json.Marshal(kubeadmDaemonSet())
	if err != nil {
		t.Fatal(err)
	}
	after, err := strategicpatch.StrategicMergePatch(before, patch, appsv1.DaemonSet{})
	if err != nil {
		t.Fatal(err)
	}
	var got appsv1.DaemonSet
	if err := json.Unmarshal(after, &got); err != nil {
		t.Fatal(err)
	}
	want := kubeadmDaemonSet()
	c := &want.Spec.Template.Spec.Containers[0]
	c.Image, c.Args = "registry.example/kube-proxy:unset", []string{"--proxy-mode=ebpf"}
	if d := cmp.Diff(want, &got); d != "" {
		t.Errorf("patched (-want +got):\n%s", d)
	}
}
