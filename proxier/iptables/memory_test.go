// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"reflect"
	"testing"
	"unsafe"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
)

// rememberingTools record which memory holds the text that they read.
type rememberingTools struct {
	Tools
	read map[uintptr]string // by address of each byte
}

func (t *rememberingTools) SaveAll(ctx context.Context, f proxier.Family, names ...string) (map[string]*xtables.Table, error) {
	tables, err := t.Tools.SaveAll(ctx, f, names...)
	for _, table := range tables {
		for _, c := range table.Chains {
			for _, text := range append([]string{c.Name}, c.Rules...) {
				for i := range len(text) {
					t.read[start(text)+uintptr(i)] = text
				}
			}
		}
	}
	return tables, err
}

func start(s string) uintptr { return uintptr(unsafe.Pointer(unsafe.StringData(s))) }

// TestReadIsNotKept: no string that a family keeps is a part of the text that was read. It would
// keep all of that text in memory, which may be 15 MB.
func TestReadIsNotKept(t *testing.T) {
	tools := &rememberingTools{newSimulated(), map[uintptr]string{}}
	n := newNode(t, tools)
	n.Serve(0, 160, 2)
	n.MustSync()
	n.Restore(proxier.IPv4, "*nat\n:ADMIN - [0:0]\n-A ADMIN -j KUBE-SERVICES\nCOMMIT\n")
	n.MustFullSync()
	for _, family := range n.Tier.(*simulatedTier).families {
		remembered := 0
		seen := map[uintptr]bool{}
		var look func(path string, v reflect.Value)
		look = func(path string, v reflect.Value) {
			switch v.Kind() {
			case reflect.String:
				remembered++
				if text := tools.read[start(v.String())]; text != "" && v.Len() > 0 {
					t.Errorf("%s%s: %q is part of the text %q that was read", family.name, path, v, text)
				}
			case reflect.Pointer:
				if !v.IsNil() && !seen[v.Pointer()] {
					seen[v.Pointer()] = true
					look(path, v.Elem())
				}
			case reflect.Slice, reflect.Array:
				for i := range v.Len() {
					look(path+"[]", v.Index(i))
				}
			case reflect.Map:
				for i := v.MapRange(); i.Next(); {
					look(path+"{}", i.Key())
					look(path+"{}", i.Value())
				}
			case reflect.Struct:
				for i := range v.NumField() {
					if name := v.Type().Field(i).Name; name != "opts" && name != "watch" {
						look(path+"."+name, v.Field(i))
					}
				}
			}
		}
		look("", reflect.ValueOf(family))
		if remembered < 100 {
			t.Errorf("%s: only %d strings were checked", family.name, remembered)
		}
	}
}
