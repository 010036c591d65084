// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"io"
	"strings"
)

// report is what --validate-only prints, a line for each thing: what is not used, what
// is wrong, or that nothing is.
func (o *Options) report(out, errOut io.Writer) error {
	for _, warning := range o.warnings {
		fmt.Fprintln(errOut, "warning:", warning)
	}
	err := o.Validate()
	if err == nil {
		fmt.Fprintf(out, "The configuration is valid: mode %s\n", o.Config.KubeProxy.Mode)
		return nil
	}
	lines := strings.Split(err.Error(), "\n")
	for _, line := range lines {
		fmt.Fprintln(errOut, "error:", line)
	}
	return fmt.Errorf("invalid configuration; errors: %d", len(lines))
}
