// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// TestActionTexts: every action has a name.
func TestActionTexts(t *testing.T) {
	for action := lbmap.ActionLocal; action <= lbmap.ActionDirect; action++ {
		if text := actionText(uint8(action)); strings.Contains(text, "action") {
			t.Errorf("action %d is shown as %q", action, text)
		}
	}
}
