// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestDenyRanges(t *testing.T) {
	many := make([]string, 2048)
	for i := range many {
		many[i] = fmt.Sprintf("192.%d.%d.1/32", i>>8, i&255)
	}
	for _, tt := range []struct {
		denied, want []string
		closed       bool
		problem      string
	}{
		{[]string{"0.0.0.0/1", "fd00::/8", "192.0.0.0/3"}, []string{
			"128.0.0.0/2", "224.0.0.0/3", "::/1", "8000::/2", "c000::/3", "e000::/4", "f000::/5", "f800::/6", "fc00::/8", "fe00::/7",
		}, false, ""},
		{[]string{"0.0.0.0/0"}, []string{"::/0"}, true, ""},
		{[]string{"10.0.0.0/8", "10.1.0.0/16"}, []string{
			"0.0.0.0/5", "8.0.0.0/7", "11.0.0.0/8", "12.0.0.0/6", "16.0.0.0/4", "32.0.0.0/3", "64.0.0.0/2", "128.0.0.0/1", "::/0",
		}, false, ""},
		{many, nil, true, "no client is admitted"},
	} {
		x := ServiceExtras{}
		for _, text := range tt.denied {
			x.SourceRanges = append(x.SourceRanges, netip.MustParsePrefix(text))
		}
		slices.SortFunc(x.SourceRanges, comparePrefix)
		problem := ""
		x.denyRanges(func(field, format string, args ...any) { problem = field + ": " + fmt.Sprintf(format, args...) })
		var got []string
		for _, p := range x.SourceRanges {
			got = append(got, p.String())
		}
		if !slices.Equal(got, tt.want) || x.InvalidRanges != tt.closed || !strings.Contains(problem, tt.problem) || (problem == "") != (tt.problem == "") {
			t.Errorf("%.3q denied: admitted are %q, closed %v, problem %q; want %q, %v, %q", tt.denied, got, x.InvalidRanges, problem, tt.want, tt.closed, tt.problem)
		}
	}
}
