// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"testing"

	"github.com/tandem-proxy/tandem/test/equality"
)

const of = "of a rule, which its handle identifies"

func TestEveryFieldIsCompared(t *testing.T) {
	equality.Check(t, equality.Of("Rule", func(a, b *Rule) bool { return a.equal(*b) }, map[string]string{
		"Exact": of, "Status": of, "verdicts": of, "by": "the elements of the map, of which Match has one",
	}))
}
