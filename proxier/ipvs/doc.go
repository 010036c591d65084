// SPDX-License-Identifier: Apache-2.0

// Package ipvs is the tier that balances by the kernel's virtual servers, like upstream's
// mode ipvs.
//
//	PREROUTING, OUTPUT: KUBE-SERVICES marks what is to be masqueraded, by sets
//	INPUT:              KUBE-IPVS-FILTER rejects other ports of Service addresses
//	LOCAL_IN, LOCAL_OUT: the kernel's IPVS selects a destination of the virtual server
//	POSTROUTING:        KUBE-POSTROUTING masquerades
//
// A packet only gets to LOCAL_IN if its destination is local, so Service addresses are on a
// dummy device, kube-ipvs0. The number of rules does not depend on the number of Services.
//
// A virtual server treats all clients alike. Frontends that do not are assigned to a tier of
// rules (Options.OpenRules), which writes the constant rules as well. Rules translate before
// IPVS sees a packet, so a frontend that moves between the two is in both for a moment, and
// never in none.
package ipvs
