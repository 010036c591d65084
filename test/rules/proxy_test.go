// SPDX-License-Identifier: Apache-2.0

//go:build linux

package rules

import (
	"os"
	"testing"

	"github.com/tandem-proxy/tandem/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}
