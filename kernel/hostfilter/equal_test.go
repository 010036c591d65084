// SPDX-License-Identifier: Apache-2.0

package hostfilter

import (
	"testing"

	"github.com/tandem-proxy/tandem/test/equality"
)

func TestEveryFieldIsCompared(t *testing.T) {
	equality.Check(t,
		equality.Of("Firewall", func(a, b *Firewall) bool { return a.equal(*b) }, nil),
		equality.Of("Filters", func(a, b *Filters) bool { return a.equal(*b) }, map[string]string{
			"BeforeDNAT[0].Match.Not[0]": "a rule is about one family at least, and the text of those differs",
			"BeforeDNAT[0].Where":        "a rule that is removed and added again has another number",
		}),
	)
}
