// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

func (i *install) chart()       {}
func (i *install) coexistence() {}
func (i *install) restart()     {}
