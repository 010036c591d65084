// SPDX-License-Identifier: Apache-2.0

// Package equality checks that each field of a type takes part in its comparison. What decides whether
// something is programmed or told anew must not forget a field.
package equality

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

// Comparison is an equality.
type Comparison struct {
	name string
	// value makes a zero value to be filled in; equal compares two of them.
	value func() reflect.Value
	equal func(a, b reflect.Value) bool
	// ignores are fields that take no part, and why. A name stands for all fields
	// below it.
	ignores map[string]string
}

// Of is the comparison of a type. The ignored fields take no part in it; a name stands for all fields
// below it, and has the reason why not.
func Of[T any](name string, equal func(a, b *T) bool, ignores map[string]string) Comparison {
	return Comparison{
		name:  name,
		value: func() reflect.Value { return reflect.ValueOf(new(T)).Elem() },
		equal: func(a, b reflect.Value) bool {
			return equal(a.Addr().Interface().(*T), b.Addr().Interface().(*T))
		},
		ignores: ignores,
	}
}

// Check changes one field after the other.
func Check(t *testing.T, comparisons ...Comparison) {
	t.Helper()
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

var (
	addrs    = [2]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	prefixes = [2]netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("198.51.100.0/24")}
	moments  = [2]time.Time{time.Unix(1, 0), time.Unix(2, 0)}
	interned = [2]*[]string{{"zone1"}, {"zone2"}} // compared as pointers
)

// leaf sets a value that is compared as a whole to one of two, and reports whether it is such.
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
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		setEntry(v, 0)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Interface: // nil, see mutate
	default:
		panic(fmt.Sprintf("the test knows no values of %s", v.Type()))
	}
}

// setEntry gives a map one entry, with one of two values.
func setEntry(v reflect.Value, which int) {
	key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
	if !leaf(key, 0) || !leaf(value, which) {
		panic(fmt.Sprintf("the test knows no values of %s", v.Type()))
	}
	v.SetMapIndex(key, value)
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
	case reflect.Map:
		for _, which := range []int{-1, 1} {
			v.Set(reflect.MakeMap(v.Type()))
			if which >= 0 {
				setEntry(v, which)
			}
			changed(path)
		}
		v.Set(before)
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
	case reflect.Interface:
		// There is no value of any interface, so that the comparison has to ignore it, with a reason.
		changed(path)
	}
}
