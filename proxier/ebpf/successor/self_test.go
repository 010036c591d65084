// SPDX-License-Identifier: Apache-2.0

package successor

import (
	"errors"
	"os"
	"testing"

	"github.com/tandem-proxy/tandem/test/lab"
)

// TestSelf: where the test is in the initial pid namespace, both numbers are the same.
func TestSelf(t *testing.T) {
	if os.Geteuid() != 0 {
		lab.SkipOrFail(t, errors.New("root"))
	}
	self, err := Self()
	if err != nil {
		t.Fatal(err)
	}
	// The initial pid namespace's number is fixed: PROC_PID_INIT_INO of linux/proc_ns.h.
	if ns, err := os.Readlink("/proc/self/ns/pid"); err != nil || ns != "pid:[4026531836]" {
		t.Skipf("missing: the initial pid namespace; this process is in %s (error %v)", ns, err)
	}
	if int(self) != os.Getpid() {
		t.Errorf("the number is %d, want %d", self, os.Getpid())
	}
}
