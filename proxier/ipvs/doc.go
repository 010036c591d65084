// SPDX-License-Identifier: Apache-2.0

// Package ipvs is the tier that balances in the kernel's virtual servers, as upstream's
// mode of that name.
//
//	PREROUTING, OUTPUT: KUBE-SERVICES marks what is to be masqueraded, by sets
//	INPUT:              KUBE-IPVS-FILTER refuses what is sent to an address of Services otherwise
//	LOCAL_IN, LOCAL_OUT: the kernel's IPVS leads to one of a virtual server's destinations
//	POSTROUTING:        KUBE-POSTROUTING masquerades
//
// A packet only gets to LOCAL_IN if its address is one of this node, so addresses of
// Services are on a device of no consequence, kube-ipvs0. The number of rules does not
// depend on the number of Services.
//
// A virtual server does the same for everybody. Frontends of which that is not true are
// carried by rules: this tier has one of package iptables, which writes the constant rules
// as well. Rules translate before IPVS sees a packet, so that what moves between the two is
// there twice for a moment, and never missing.
package ipvs
