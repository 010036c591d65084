// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"

	kubeproxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
)

// Difference is a field that is not the same in two configurations.
type Difference struct {
	// Path is as in Validate.
	Path string
	// Old and New are the values as JSON; empty where there is none.
	Old, New string
}

func (d Difference) String() string {
	or := func(text string) string {
		if text == "" {
			return "unset"
		}
		return text
	}
	return fmt.Sprintf("%s from %s to %s", d.Path, or(d.Old), or(d.New))
}

// Differences are sorted by their paths. A list counts as one field.
func Differences(before, after *Config) (list []Difference, err error) {
	b, err := before.tree()
	if err != nil {
		return nil, err
	}
	a, err := after.tree()
	if err != nil {
		return nil, err
	}
	compare("", b, a, &list)
	return list, nil
}

// tree has all fields by name, those of the TandemConfiguration below its kind.
func (c *Config) tree() (tree map[string]any, err error) {
	text, err := json.Marshal(struct {
		*kubeproxyv1alpha1.KubeProxyConfiguration
		*TandemConfiguration `json:"TandemConfiguration"`
	}{&c.KubeProxy, &c.Tandem})
	if err == nil {
		err = json.Unmarshal(text, &tree)
	}
	if err != nil {
		return nil, fmt.Errorf("compare configurations: %w", err)
	}
	return tree, nil
}

func compare(at string, before, after any, list *[]Difference) {
	b, ok1 := before.(map[string]any)
	a, ok2 := after.(map[string]any)
	if !ok1 && !ok2 {
		if !reflect.DeepEqual(before, after) {
			*list = append(*list, Difference{at, text(before), text(after)})
		}
		return
	}
	names := map[string]struct{}{}
	for name := range b {
		names[name] = struct{}{}
	}
	for name := range a {
		names[name] = struct{}{}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		path := name
		if at != "" {
			path = at + "." + name
		}
		compare(path, b[name], a[name], list)
	}
}

// text is a value as JSON, which it was made from.
func text(value any) string {
	if value == nil {
		return ""
	}
	b, err := json.Marshal(value)
	if err != nil {
		return fmt.Sprint(value)
	}
	return string(b)
}
