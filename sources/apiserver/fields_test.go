// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/observe/health"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/sources/nodefacts"
)

// unset are fields that the full objects lack, as no part of the proxy reads them. A field that a
// new version of the API adds fails TestFullObjects: set it in the full object, and keep or drop
// it in the trimmer, or list it here.
var unset = map[string][]string{
	"Service":       {"Spec.Ports[0].TargetPort.IntVal", "Status.LoadBalancer.Ingress[0].Ports[0]", "Status.Conditions[0]"},
	"EndpointSlice": {"Endpoints[0].TargetRef"},
	"Node":          {"Spec.ConfigSource", "Spec.DoNotUseExternalID", "Spec.PodPreemptionPolicy", "Spec.Taints[0].Value", "Spec.Taints[0].TimeAdded", "Status"},
}

// fullObjects are objects with every field set that the proxy could read.
func fullObjects() map[string]runtime.Object {
	service, slice, node := fullService(), fullSlice(), fullNode()
	service.Annotations[proxier.AnnotationFastPath] = "disabled"
	service.Labels, slice.Labels = nil, map[string]string{discoveryv1.LabelServiceName: "web"}
	slice.Annotations[v1.EndpointsLastChangeTriggerTime] = testStart.Add(time.Second).Format(time.RFC3339Nano)
	slice.Endpoints = slice.Endpoints[:1]
	node.Labels = map[string]string{v1.LabelTopologyZone: "zone-a"}
	node.DeletionTimestamp = nil // which would hide the effect of the taint
	return map[string]runtime.Object{"Service": &service, "EndpointSlice": &slice, "Node": &node}
}

// eachField calls f with the path of every field of a value, and of the elements of its lists.
func eachField(path string, v reflect.Value, f func(path string, field reflect.Value)) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			eachField(path, v.Elem(), f)
		}
	case reflect.Slice:
		for i := range v.Len() {
			eachField(fmt.Sprintf("%s[%d]", path, i), v.Index(i), f)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if t := v.Type().Field(i); t.IsExported() && t.Name != "TypeMeta" && t.Name != "ObjectMeta" {
				at := strings.TrimPrefix(path+"."+t.Name, ".")
				f(at, v.Field(i))
				eachField(at, v.Field(i), f)
			}
		}
	}
}

// TestFullObjects: the objects of the tests have every field of the API.
func TestFullObjects(t *testing.T) {
	for kind, object := range fullObjects() {
		eachField("", reflect.ValueOf(object), func(path string, field reflect.Value) {
			for _, known := range unset[kind] {
				if strings.HasPrefix(path, known) {
					return
				}
			}
			if field.IsZero() {
				t.Errorf("%s of the full %s is not set", path, kind)
			}
		})
	}
}

// TestModelReadsKeptFields: whichever field is missing in an object, decisions are the same with
// the trimmed object as with the whole one, so no field that the model reads is dropped.
func TestModelReadsKeptFields(t *testing.T) {
	for kind := range fullObjects() {
		base := model(t, fullObjects()[kind])
		variants, read := 0, 0
		check := func(path string, change func(runtime.Object)) {
			t.Helper()
			variants++
			whole, trimmed := fullObjects()[kind], fullObjects()[kind]
			change(whole)
			change(trimmed)
			trim := &trimmer{start: testStart, serviceAnnotations: []string{proxier.AnnotationFastPath}}
			if _, err := trim.transform(trimmed); err != nil {
				t.Fatal(err)
			}
			want := model(t, whole)
			if got := model(t, trimmed); got != want {
				t.Errorf("%s without %s: the model differs after trimming\n got %s\nwant %s", kind, path, got, want)
			}
			if want != base {
				read++
			}
		}
		check("", func(runtime.Object) {})
		eachField("", reflect.ValueOf(fullObjects()[kind]), func(path string, _ reflect.Value) {
			check(path, func(o runtime.Object) {
				eachField("", reflect.ValueOf(o), func(at string, field reflect.Value) {
					if at == path {
						field.SetZero()
					}
				})
			})
		})
		t.Logf("%s: %d fields, the model reads %d", kind, variants-1, read)
		if read < 4 {
			t.Errorf("only %d fields of %s have an effect", read, kind)
		}
	}
}

// model is what the proxy makes of an object, as text.
func model(t *testing.T, object runtime.Object) string {
	t.Helper()
	tracker := proxier.NewChangeTracker("node1", testStart, nil)
	service, slice := fullService(), fullSlice()
	slice.Labels = map[string]string{discoveryv1.LabelServiceName: "web"}
	switch o := object.(type) {
	case *v1.Service:
		service = *o
	case *discoveryv1.EndpointSlice:
		slice = *o
	case *v1.Node:
		return nodeModel(t, o)
	}
	tracker.UpdateService(&service)
	tracker.UpdateEndpointSlice(&slice)
	var text strings.Builder
	for _, change := range tracker.Take() {
		fmt.Fprintf(&text, "trigger %v ", change.Trigger)
		if change.Service != nil {
			dump(&text, reflect.ValueOf(change.Service))
		}
		for _, s := range change.Slices {
			dump(&text, reflect.ValueOf(s))
		}
	}
	return text.String()
}

// dump writes a value with what its pointers refer to.
func dump(w *strings.Builder, v reflect.Value) {
	switch {
	case v.Kind() == reflect.Pointer || v.Kind() == reflect.Interface:
		if v.IsNil() {
			w.WriteString("nil ")
			return
		}
		dump(w, v.Elem())
	case v.Type() == reflect.TypeFor[netip.Addr](), v.Type() == reflect.TypeFor[netip.AddrPort](), v.Type() == reflect.TypeFor[netip.Prefix]():
		fmt.Fprintf(w, "%v ", v)
	case v.Kind() == reflect.Slice || v.Kind() == reflect.Array:
		w.WriteString("[")
		for i := range v.Len() {
			dump(w, v.Index(i))
		}
		w.WriteString("]")
	case v.Kind() == reflect.Struct:
		w.WriteString("{")
		for i := range v.NumField() {
			fmt.Fprintf(w, "%s:", v.Type().Field(i).Name)
			dump(w, v.Field(i))
		}
		w.WriteString("}")
	default:
		fmt.Fprintf(w, "%v ", v)
	}
}

// nodeModel has the facts of a Node in each way to detect pods, and whether it is eligible.
func nodeModel(t *testing.T, node *v1.Node) string {
	t.Helper()
	c := config.New()
	c.KubeProxy.DetectLocalMode = config.LocalModeNodeCIDR
	gate, err := config.NewFeatureGate()
	if err != nil {
		t.Fatal(err)
	}
	settings, err := nodefacts.New(c, gate)
	if err != nil {
		t.Fatal(err)
	}
	facts := settings.Facts()
	settings.FromNode(node, &facts)
	h, mux, w := health.New(health.Options{Timeout: time.Minute}), http.NewServeMux(), httptest.NewRecorder()
	h.OnNodeAdd(node)
	h.Install(mux)
	mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/healthz", nil))
	return fmt.Sprintf("%+v, /healthz %d", facts, w.Code)
}
