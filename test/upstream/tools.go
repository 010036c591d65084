// SPDX-License-Identifier: Apache-2.0

//go:build linux

package upstream

import (
	"os"
	"os/exec"
	"path/filepath"

	"github.com/tandem-proxy/tandem/test/lab"
)

// ToolsT has a directory, that comes first in a PATH, lead from the plain names of
// iptables' commands to those of a variant, nft or legacy: upstream's mode iptables runs what
// it finds by those names. A test without them ends.
func ToolsT(tb lab.TB, dir, variant string) {
	tb.Helper()
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, tool := range []string{"", "-save", "-restore"} {
			path, err := exec.LookPath(family + "-" + variant + tool)
			if err == nil {
				path, err = filepath.EvalSymlinks(path)
			}
			if err == nil {
				err = os.Symlink(path, filepath.Join(dir, family+tool))
			}
			if err != nil {
				lab.SkipOrFail(tb, err)
			}
		}
	}
}
