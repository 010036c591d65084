// SPDX-License-Identifier: Apache-2.0

// Package exposition parses the text of /metrics as far as tests compare it: names, types,
// labels and buckets, but not values.
package exposition

import (
	"maps"
	"regexp"
	"slices"
	"strings"
)

// Family is a metric.
type Family struct {
	Type string
	// Labels are the names of all labels of its series, sorted, except le and quantile.
	Labels []string
	// Buckets of a histogram, in their order.
	Buckets []string
}

var (
	series = regexp.MustCompile(`^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? \S+$`)
	label  = regexp.MustCompile(`([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"`)
)

// Parse reads the text format. A metric without series has neither labels nor buckets.
func Parse(text string) map[string]Family {
	types, labels, buckets := map[string]string{}, map[string]map[string]struct{}{}, map[string][]string{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			name, is, _ := strings.Cut(rest, " ")
			types[name], labels[name] = is, map[string]struct{}{}
			continue
		}
		m := series.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		name := m[1]
		for _, part := range []string{"_bucket", "_sum", "_count"} {
			if whole, ok := strings.CutSuffix(name, part); ok && (types[whole] == "histogram" || types[whole] == "summary") {
				name = whole
			}
		}
		for _, l := range label.FindAllStringSubmatch(m[2], -1) {
			switch {
			case l[1] == "le" && types[name] == "histogram":
				if !slices.Contains(buckets[name], l[2]) {
					buckets[name] = append(buckets[name], l[2])
				}
			case l[1] == "quantile" && types[name] == "summary":
			case labels[name] != nil:
				labels[name][l[1]] = struct{}{}
			}
		}
	}
	all := make(map[string]Family, len(types))
	for name, is := range types {
		all[name] = Family{Type: is, Labels: slices.Sorted(maps.Keys(labels[name])), Buckets: buckets[name]}
	}
	return all
}
