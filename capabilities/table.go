// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// WriteTable prints one aligned line per feature, for people.
func (r Report) WriteTable(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "FEATURE\tSTATE\tNEEDED BY\tSINCE LINUX\tEFFECT IF MISSING\tDETAIL")
	for _, result := range r.Results {
		info, _ := Describe(result.Feature)
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\n", result.Feature, result.State,
			cell(info.NeededBy), cell(info.Since), cell(info.Without), cell(result.explanation()))
	}
	return tw.Flush()
}

// explanation joins what was learned and what went wrong.
func (r Result) explanation() string {
	var parts []string
	if r.Detail != "" {
		parts = append(parts, r.Detail)
	}
	if r.Err != nil {
		parts = append(parts, r.Err.Error())
	}
	return strings.Join(parts, "; ")
}

// cell keeps a value on one line and in one column, and shows an empty one.
func cell(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if s == "" {
		return "-"
	}
	return s
}
