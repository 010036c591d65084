// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	chartv2 "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
)

// previous is an earlier version of the chart, which the test of test/install upgrades on a cluster.
const previous = "testdata/tandem-kube-proxy-0.1.0.tgz"

// objectsOf are the objects of a chart with values, by kind and name. They are not checked against its schema.
func objectsOf(t *testing.T, c *chartv2.Chart, values map[string]any) map[string]runtime.Object {
	t.Helper()
	all, err := util.ToRenderValues(c, values, common.ReleaseOptions{Name: "tandem", Namespace: "kube-system", IsUpgrade: true, Revision: 2}, common.DefaultCapabilities)
	if err != nil {
		t.Fatal(err)
	}
	files, err := engine.Render(c, all)
	if err != nil {
		t.Fatal(err)
	}
	objects := map[string]runtime.Object{}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if !strings.HasSuffix(name, ".yaml") {
			continue
		}
		for _, o := range decode(t, files[name]) {
			about, err := meta.Accessor(o)
			if err != nil {
				t.Fatal(err)
			}
			objects[fmt.Sprintf("%T %s/%s", o, about.GetNamespace(), about.GetName())] = o
		}
	}
	return objects
}

// immutable returns the immutable fields of an object: the API server rejects an update that changes them.
func immutable(o runtime.Object) any {
	switch o := o.(type) {
	case *appsv1.DaemonSet:
		return o.Spec.Selector
	case *appsv1.Deployment:
		return o.Spec.Selector
	case *rbacv1.ClusterRoleBinding:
		return o.RoleRef
	case *rbacv1.RoleBinding:
		return o.RoleRef
	}
	return nil
}

// TestUpgrade: the chart takes the place of an earlier version: with the values that a user gave that one, and, as helm upgrade --reuse-values
// does, with all of its values. No immutable field changes.
func TestUpgrade(t *testing.T) {
	old, err := loader.Load(previous)
	if err != nil {
		t.Fatal(err)
	}
	now, err := loader.Load(chart)
	if err != nil {
		t.Fatal(err)
	}
	if old.Metadata.Version == now.Metadata.Version {
		t.Fatalf("both are version %s", now.Metadata.Version)
	}
	for _, mode := range []string{"ebpf", "iptables", "ipvs"} {
		given := required(map[string]any{
			"mode": mode, "clusterCIDR": []any{"10.244.0.0/16", "fd00:10:244::/48"}, "rbac": map[string]any{"optOuts": true},
			"config": map[string]any{"conntrack": map[string]any{"maxPerCore": 0}},
		})
		all, err := util.CoalesceValues(old, given)
		if err != nil {
			t.Fatal(err)
		}
		before := objectsOf(t, old, given)
		if len(before) == 0 {
			t.Fatal("the earlier version has no objects")
		}
		for how, values := range map[string]map[string]any{"--reset-then-reuse-values": given, "--reuse-values": all} {
			after := objectsOf(t, now, values)
			for name, o := range before {
				switch is, was := immutable(after[name]), immutable(o); {
				case after[name] == nil:
					t.Errorf("mode %s, %s: %s is gone", mode, how, name)
				case !reflect.DeepEqual(is, was):
					t.Errorf("mode %s, %s: %s has %v, which was %v", mode, how, name, is, was)
				}
			}
		}
	}
}
