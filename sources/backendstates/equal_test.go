// SPDX-License-Identifier: Apache-2.0

package backendstates

import (
	"testing"

	"github.com/tandem-proxy/tandem/test/equality"
)

func TestEveryFieldIsCompared(t *testing.T) {
	equality.Check(t, equality.Of("Entry", (*Entry).equal, nil))
}
