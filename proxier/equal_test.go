// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"
)

// comparison is an equality that decides whether something is programmed anew.
// A field that it forgets is a change that no tier hears of.
type comparison struct {
	name string
	// value makes a zero value to be filled in; equal compares two of them.
	value func() reflect.Value
	equal func(a, b reflect.Value) bool
	// ignores are fields that take no part, and why. A name stands for all fields
	// below it.
	ignores map[string]string
}

func compares[T any](name string, equal func(a, b *T) bool, ignores map[string]string) comparison {
	return comparison{
		name:  name,
		value: func() reflect.Value { return reflect.ValueOf(new(T)).Elem() },
		equal: func(a, b reflect.Value) bool {
			return equal(a.Addr().Interface().(*T), b.Addr().Interface().(*T))
		},
		ignores: ignores,
	}
}

const backing = "only the memory that a list of the value uses"

var comparisons = []comparison{
	compares("Service", (*Service).equal, map[string]string{
		"Name": "the tracker compares Services of one name", "onePort": backing,
	}),
	compares("ServiceExtras", (*ServiceExtras).equal, nil),
	compares("EndpointSlice", (*EndpointSlice).equal, map[string]string{"onePort": backing}),
	compares("Frontend", (*Frontend).equal, nil),
	compares("Decision", (*Decision).equal, map[string]string{
		"index": "identifies the service port; two decisions that are compared have the same", "oneFrontend": backing,
	}),
	compares("Detector", (*Detector).equal, nil),
	compares("Facts", (*Facts).equal, nil),
	compares("Facts.decidesAlike", (*Facts).decidesAlike, map[string]string{
		"LocalAddrs": "part of NodeRules", "ServiceCIDRs": "part of NodeRules", "Uplinks": "part of NodeRules",
	}),
	compares("NodeRules", (*NodeRules).Equal, nil),
	compares("claimsAs", (*Decision).claimsAs, map[string]string{
		"Name": "identifies the service port", "UID": "no claim", "index": "identifies the service port", "oneFrontend": backing,
		"Affinity": "no claim", "OptedOut": "no claim", "Balancing": "no claim", "Weighted": "no claim", "HealthCheckNodePort": "no claim", "Backends": "no claim", "Empty": "no claim",
		"Frontends[0].Routes": "no claim", "Frontends[0].Filtered": "no claim", "Frontends[0].Ranges": "no claim",
		"Frontends[0].Pods": "no claim", "Frontends[0].Host": "no claim", "Frontends[0].Unguarded": "no claim",
		"Frontends[0].Conflict": "the outcome of claims", "Frontends[0].Left": "no claim",
	}),
}

// A field that is added to one of these types has to be compared, or listed
// above with the reason why not.
func TestEveryFieldIsCompared(t *testing.T) {
	for _, c := range comparisons {
		t.Run(c.name, func(t *testing.T) {
			a, b := c.value(), c.value()
			fill(a)
			fill(b)
			if !c.equal(a, b) {
				t.Fatal("two values with the same fields are not equal")
			}
			unused := maps.Clone(c.ignores)
			mutate(b, "", func(path string) {
				reason, equal := "", c.equal(a, b)
				for field, why := range c.ignores {
					if path == field || strings.HasPrefix(path, field+".") || strings.HasPrefix(path, field+"[") {
						reason = why
						delete(unused, field)
					}
				}
				switch {
				case equal && reason == "":
					t.Errorf("values that differ in %s are equal", path)
				case !equal && reason != "":
					t.Errorf("values that differ in %s are not equal, though it is to be ignored: %s", path, reason)
				}
			})
			if len(unused) > 0 {
				t.Errorf("no such field: %v", slices.Sorted(maps.Keys(unused)))
			}
		})
	}
}

// Types that are compared by == take part with every field, unless one is a pointer.
func TestPlainComparisons(t *testing.T) {
	for _, v := range []any{Backend{}, Route{}, HealthCheck{}, ServicePort{}, endpointPort{}, frontendKey{}} {
		if !reflect.TypeOf(v).Comparable() {
			t.Errorf("%T cannot be compared", v)
		}
		for i := range reflect.TypeOf(v).NumField() {
			if f := reflect.TypeOf(v).Field(i); f.Type.Kind() == reflect.Pointer {
				t.Errorf("%T.%s is a pointer: two that say the same differ", v, f.Name)
			}
		}
	}
}

var (
	addrs    = [2]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	prefixes = [2]netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("198.51.100.0/24")}
	moments  = [2]time.Time{time.Unix(1, 0), time.Unix(2, 0)}
	interned = [2]*[]string{{"zone1"}, {"zone2"}} // compared as pointers
)

// leaf sets a value that is compared as a whole to one of two, and says whether it is such.
func leaf(v reflect.Value, which int) bool {
	switch p := v.Addr().Interface().(type) {
	case *netip.Addr:
		*p = addrs[which]
	case *netip.AddrPort:
		*p = netip.AddrPortFrom(addrs[which], 80)
	case *netip.Prefix:
		*p = prefixes[which]
	case *time.Time:
		*p = moments[which]
	case **[]string:
		*p = interned[which]
	default:
		switch v.Kind() {
		case reflect.Bool:
			v.SetBool(which == 0)
		case reflect.String:
			v.SetString([]string{"one", "two"}[which])
		case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
			v.SetInt(int64(which + 1))
		case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
			v.SetUint(uint64(which + 1))
		default:
			return false
		}
	}
	return true
}

// field is one of a struct, exported or not.
func field(v reflect.Value, i int) reflect.Value {
	f := v.Field(i)
	return reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem()
}

// fill gives every field a value, and every list one element.
func fill(v reflect.Value) {
	if leaf(v, 0) {
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fill(field(v, i))
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(v.Index(i))
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	default:
		panic(fmt.Sprintf("the test knows no values of %s", v.Type()))
	}
}

// mutate changes one field of a value at a time, calls changed with the field's path, and
// restores the field.
func mutate(v reflect.Value, path string, changed func(path string)) {
	before := reflect.New(v.Type()).Elem()
	before.Set(v)
	if leaf(v, 1) {
		changed(path)
		v.Set(before)
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			mutate(field(v, i), strings.TrimPrefix(path+"."+v.Type().Field(i).Name, "."), changed)
		}
	case reflect.Array:
		for i := range v.Len() {
			mutate(v.Index(i), fmt.Sprintf("%s[%d]", path, i), changed)
		}
	case reflect.Slice:
		v.SetZero()
		changed(path)
		v.Set(before)
		mutate(v.Index(0), path+"[0]", changed)
	case reflect.Pointer:
		v.SetZero()
		changed(path)
		v.Set(before)
		mutate(v.Elem(), path, changed)
	}
}
