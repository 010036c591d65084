// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/test/exposition"
)

// row is a metric in a table of docs/metrics.md.
var row = regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| (counter|gauge|histogram) \\| ([^|]*)\\| (e?v?i?) \\| [^|]+ \\|$")

// TestDocumented: every metric stands in docs/metrics.md, with its type and labels, and no other.
func TestDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]string{}
	for _, m := range row.FindAllStringSubmatch(string(page), -1) {
		labels := strings.Fields(strings.NewReplacer("`", "", ",", "").Replace(m[3]))
		slices.Sort(labels)
		documented[m[1]] = fmt.Sprint(m[2], " ", labels)
	}
	there := map[string]string{}
	for name, f := range exposition.Parse(full(t)) {
		there[name] = fmt.Sprint(f.Type, " ", f.Labels)
	}
	if d := cmp.Diff(there, documented); d != "" {
		t.Errorf("metrics (-registered +docs/metrics.md):\n%s", d)
	}
}
