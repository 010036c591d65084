// SPDX-License-Identifier: Apache-2.0

package scenarios

import (
	"cmp"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// changesText formats the changes of service ports.
func changesText(list []proxier.PortChange) string {
	texts := make([]string, len(list))
	for i, c := range list {
		switch {
		case c.Old == nil:
			texts[i] = "added " + c.New.String()
		case c.New == nil:
			texts[i] = "removed " + c.Old.String()
		default:
			head, old, _ := strings.Cut(c.Old.String(), "\n")
			headNow, now, _ := strings.Cut(c.New.String(), "\n")
			texts[i] = "changed " + c.New.Name.String() + " " + c.New.Name.Protocol.String() + "\n"
			if head != headNow {
				texts[i] += "- " + head + "\n+ " + headNow + "\n"
			}
			texts[i] += diffLines(old, now)
		}
	}
	slices.SortStableFunc(texts, func(a, b string) int {
		_, a, _ = strings.Cut(a, " ")
		_, b, _ = strings.Cut(b, " ")
		a, _, _ = strings.Cut(a, "\n")
		b, _, _ = strings.Cut(b, "\n")
		return cmp.Compare(a, b)
	})
	return strings.Join(texts, "")
}

// diffLines returns removed lines after a minus and added ones after a plus.
func diffLines(before, after string) string {
	a, b := strings.Split(strings.TrimSuffix(before, "\n"), "\n"), strings.Split(strings.TrimSuffix(after, "\n"), "\n")
	var out strings.Builder
	for _, side := range []struct {
		sign        string
		list, other []string
	}{{"-", a, b}, {"+", b, a}} {
		other := slices.Clone(side.other)
		for _, l := range side.list {
			if i := slices.Index(other, l); i >= 0 {
				other = slices.Delete(other, i, i+1)
			} else if l != "" {
				out.WriteString(side.sign + " " + strings.TrimPrefix(l, "  ") + "\n")
			}
		}
	}
	return out.String()
}
