// SPDX-License-Identifier: Apache-2.0

// Package hostfilter finds rules of this host that treat packets of a connection differently according
// to where its destination is translated: in netfilter, or ahead of it, when a packet comes in. It knows
// nothing of what is translated.
//
// There are two kinds:
//
//   - Rules that can drop packets before netfilter translates their destination: Calico's host endpoints
//     with preDNAT policies, operators' rules in the tables raw and mangle, early chains of
//     nf_tables. They filter by what a client dialled, and do not see it if it is translated earlier.
//   - Firewalls that forward only what they know, and know translated connections by conntrack
//     (firewalld: "ct status dnat accept"), or by a mark that kube-proxy's rules set (a FORWARD policy of
//     DROP, ufw). They drop what is translated earlier.
//
// Both variants of iptables are read, and all tables of nf_tables but kube-proxy's. What rules match is
// read as far as it is about protocols, destination ports and addresses. What is not understood, such
// as sources, marks and sets, is taken to match where it drops, and not to match where it accepts.
package hostfilter
