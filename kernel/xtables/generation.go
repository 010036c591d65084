// SPDX-License-Identifier: Apache-2.0

package xtables

import "github.com/tandem-proxy/tandem/kernel/nftables"

// Generation returns a number that increases with every change of rules in the network namespace,
// by any program: by one for each table of a restore. The legacy variant has no such number: ok is
// false.
func (t *Tools) Generation() (n uint32, ok bool, err error) {
	if t.variant != NFT {
		return 0, false, nil
	}
	n, err = nftables.Generation()
	return n, err == nil, err
}
