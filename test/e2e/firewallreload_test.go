// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"errors"
	"strings"
	"testing"
)

// reload is what a firewall does that takes all rules of a node for its own: it replaces the tables.
// Built-in chains stay. If those of table nat went too (iptables-nft -X), the kernel would translate
// nothing any more, whatever kube-proxy there is.
const reload = `*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:FIREWALL - [0:0]
-A INPUT -j FIREWALL
-A FORWARD -j FIREWALL
-A FIREWALL -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
`

// TestFirewallReload: a firewall that deletes all rules in mid-flow, again and again, breaks no
// established connection, and new ones are served again within seconds.
func TestFirewallReload(t *testing.T) {
	for _, mode := range []string{"ebpf", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			s := newStage(t)
			s.start("--proxy-mode=" + mode)
			defer s.end()
			s.await(t, "ready", ready(s.node, 200))
			flows := s.open()
			for range 3 {
				for _, program := range []string{"iptables-nft-restore", "ip6tables-nft-restore"} {
					restore := s.node.Command(t.Context(), program)
					restore.Stdin = strings.NewReader(reload)
					if out, err := restore.CombinedOutput(); err != nil {
						t.Fatalf("%s: %v: %s", program, err, out)
					}
				}
				checkAll(t, flows)
				s.await(t, "new connections", func() error {
					var errs []error
					for network, to := range targets() {
						_, err := s.client.Ask(t.Context(), network[:3], to)
						errs = append(errs, err)
					}
					for network, to := range outside(s.node) {
						_, err := s.far.Ask(t.Context(), network[:3], to)
						errs = append(errs, err)
					}
					return errors.Join(errs...)
				})
				checkAll(t, flows)
			}
		})
	}
}
