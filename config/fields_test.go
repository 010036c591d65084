// SPDX-License-Identifier: Apache-2.0

package config

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cliflag "k8s.io/component-base/cli/flag"
)

// A field that is added to a document takes part in everything, or one of these tests fails.

// leaf is a field with a value of its own.
type leaf struct {
	path  string // as in Validate
	value reflect.Value
}

// leaves are all fields of both documents.
func leaves(c *Config) []leaf {
	return append(leavesOf("", reflect.ValueOf(&c.KubeProxy).Elem()), leavesOf(TandemKind, reflect.ValueOf(&c.Tandem).Elem())...)
}

func leavesOf(at string, v reflect.Value) (list []leaf) {
	if v.Kind() != reflect.Struct || v.Type() == reflect.TypeFor[metav1.Duration]() {
		return []leaf{{at, v}}
	}
	for i := range v.NumField() {
		f := v.Type().Field(i)
		if f.Type == reflect.TypeFor[metav1.TypeMeta]() {
			continue
		}
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous && name == "":
			name = at
		case at != "":
			name = at + "." + name
		}
		list = append(list, leavesOf(name, v.Field(i))...)
	}
	return list
}

// change gives a field another value of its type, which need not be valid.
func change(t *testing.T, v reflect.Value) {
	t.Helper()
	switch v.Interface().(type) {
	case metav1.Duration:
		v.Set(reflect.ValueOf(metav1.Duration{Duration: 12345 * time.Second}))
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		next := reflect.New(v.Type().Elem())
		if !v.IsNil() {
			next.Elem().Set(v.Elem())
		}
		change(t, next.Elem())
		v.Set(next)
	case reflect.Bool:
		v.SetBool(!v.Bool())
	case reflect.String:
		v.SetString("another")
	case reflect.Int32, reflect.Int64:
		v.SetInt(v.Int() + 77)
	case reflect.Uint32:
		v.SetUint(v.Uint() + 77)
	case reflect.Float32:
		v.SetFloat(v.Float() + 77)
	case reflect.Slice:
		item := reflect.New(v.Type().Elem()).Elem()
		for _, l := range leavesOf("", item) {
			change(t, l.value)
		}
		v.Set(reflect.Append(v, item))
	case reflect.Map:
		next := reflect.MakeMap(v.Type())
		next.SetMapIndex(reflect.ValueOf("Another"), reflect.ValueOf(true))
		v.Set(next)
	case reflect.Struct:
		for i := range v.NumField() {
			change(t, v.Field(i))
		}
	default:
		t.Fatalf("a field of kind %s: teach this test to change it", v.Kind())
	}
}

// Differences finds a change of every field, under its own path.
func TestDifferencesOfEveryField(t *testing.T) {
	for i, l := range leaves(New()) {
		// Types of libraries, which write themselves.
		if strings.HasPrefix(l.path, "logging.flushFrequency") || strings.HasPrefix(l.path, "logging.options") {
			continue
		}
		c := New()
		change(t, leaves(c)[i].value)
		list, err := Differences(New(), c)
		if err != nil {
			t.Fatal(err)
		}
		if len(list) == 0 || !strings.HasPrefix(list[0].Path, l.path) {
			t.Errorf("%s was changed; the differences are %v", l.path, list)
		}
	}
}

// Every field of the TandemConfiguration has a default, or its zero value means something.
func TestDefaultsOfEveryField(t *testing.T) {
	zeroIsMeant := []string{
		"manifests", "strictSourceRanges", "readyMaxAPIAge", "hostPort", "loadBalancer.maglevTableSize", "loadBalancer.maglevSeed", "loadBalancer.dsrSourceCIDR", "coexistence.preset", "coexistence.frontends", "coexistence.clients", "ebpf.cgroupRoot", "ebpf.devices", "ebpf.podDevices", "ebpf.resetRemovedBackends", "ebpf.ignoreHostFilters", "ebpf.masqueradeLocalBackends", "ebpf.serviceSignals", "ebpf.maxMapMemory", "ebpf.preallocateMaps", "ebpf.maxTCPFlows", "ebpf.maxUDPFlows", "ebpf.maxYoungFlows", "ipvs.upstreamSemantics",
	}
	for _, l := range leavesOf("", reflect.ValueOf(&New().Tandem).Elem()) {
		if l.value.IsZero() != slices.Contains(zeroIsMeant, l.path) {
			t.Errorf("%s is %v by default; SetDefaults fills it in, or zeroIsMeant names it", l.path, l.value)
		}
	}
}

// Every field of the TandemConfiguration that can be wrong is validated.
func TestValidationOfEveryField(t *testing.T) {
	// A path that does not exist is only known where the process runs. Every seed is right.
	free := []string{"manifests", "loadBalancer.maglevSeed", "ebpf.cgroupRoot", "ebpf.procRoot"}
	wrong := func(v reflect.Value) bool {
		switch {
		case v.Type() == reflect.TypeFor[metav1.Duration]():
			v.Set(reflect.ValueOf(metav1.Duration{Duration: -time.Second}))
		case v.Kind() == reflect.Uint32:
			v.SetUint(1<<32 - 1)
		case v.Kind() == reflect.String:
			v.SetString(" ")
		case v.Type() == reflect.TypeFor[[]string]():
			v.Set(reflect.ValueOf([]string{""}))
		default:
			return false // every value is right
		}
		return true
	}
	for i, l := range leavesOf("", reflect.ValueOf(&New().Tandem).Elem()) {
		c := New()
		c.KubeProxy.Mode = ModeEBPF
		c.Tandem.EBPF.Fallback = []string{ModeIPVS}
		if slices.Contains(free, l.path) || !wrong(leavesOf("", reflect.ValueOf(&c.Tandem).Elem())[i].value) {
			continue
		}
		found := false
		for _, e := range c.Validate() {
			found = found || strings.HasPrefix(e.Field, TandemKind+"."+l.path)
		}
		if !found {
			t.Errorf("%s is not validated: %v", l.path, c.Validate())
		}
	}
}

// Every field of the TandemConfiguration has a flag, and errors name the flag that set a
// field.
func TestFlagsOfEveryField(t *testing.T) {
	values := map[string]string{"uint32": "77", "duration": "12345s", "string": "another", "stringSlice": "another"}
	set := map[string]string{}
	var names []string
	var sets cliflag.NamedFlagSets
	New().AddFlags(&sets)
	for _, group := range []string{flagsGeneral, flagsAPI, flagsTraffic, flagsBeside, flagsEBPF, flagsIPVS} {
		sets.FlagSet(group).VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	}
	for _, name := range names {
		c := New()
		var sets cliflag.NamedFlagSets
		c.AddFlags(&sets)
		for _, fs := range sets.FlagSets {
			f := fs.Lookup(name)
			if f == nil {
				continue
			}
			value, ok := values[f.Value.Type()]
			if f.Value.Type() == "bool" {
				value, ok = "true", true
				if f.DefValue == "true" {
					value = "false"
				}
			}
			if !ok {
				continue
			}
			if err := fs.Set(name, value); err != nil {
				t.Fatal(err)
			}
		}
		list, err := Differences(New(), c)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range list {
			set[d.Path] = name
			if at, ok := fieldOf[name]; ok && at != d.Path {
				t.Errorf("--%s sets %s, and errors about %s name it", name, d.Path, at)
			}
		}
	}
	for _, l := range leavesOf(TandemKind, reflect.ValueOf(&New().Tandem).Elem()) {
		if set[l.path] == "" {
			t.Errorf("no flag sets %s", l.path)
		}
	}
}
