// SPDX-License-Identifier: Apache-2.0

// Package scenarios holds the semantics of Services as scripts: a small
// cluster, objects in YAML, a sequence of events, and expectations. The
// scripts do not depend on a datapath: Model replays them on the decision
// table alone, and each tier replays the same files with real traffic.
//
// A scenario is a txtar file. Its comment is the script, one command per line;
// its files are objects and expected texts. An example:
//
//	# externalTrafficPolicy: Local keeps clients to the node they came to.
//	# Statements: S42 S45
//
//	node node1
//	node node2
//	pod web1 node1
//	client c
//
//	apply web.yaml
//	reach client c -> node1:30080 : backends web1 source client
//	reach client c -> node2:30080 : no-answer
//
//	-- web.yaml --
//	apiVersion: v1
//	...
//
// The first comment line is the title. The last line of the same block lists the
// numbers of the statements of docs/semantics.md that the scenario tests.
// Files must be formatted as Format does it.
//
// # The cluster
//
//	node NAME [zone=ZONE]
//	pod NAME NODE
//	client NAME
//
// declare it, in this order and before all other commands. Addresses follow the
// plan of package lab: node N has 172.18.0.N and fd00:18::N, its pod M has
// 10.244.N.M and fd00:10:244:N::M, client K has 198.51.100.K and
// 2001:db8:51:100::K. Numbers start at 1, in the order of declaration. ClusterIPs
// are in 10.96.0.0/16 and fd00:10:96::/112, addresses of load balancers and
// external IPs in 203.0.113.0/24 and 2001:db8:203:113::/64. An endpoint in the
// host network has an address of the node, and answers under the node's name.
// Pods and nodes answer on every address and port of all EndpointSlices of the
// scenario; see Listeners.
//
// # Events
//
//	config KEY=VALUE...           of all proxies; other keys are unchanged
//	apply FILE                    Services, EndpointSlices, Nodes and Pods, at once
//	delete service NS/NAME
//	delete endpointslice NS/NAME
//	delete pod NS/NAME
//	announce PREFIX [NODE]...     the network routes a prefix to these nodes
//	address add|del NODE ADDR     of a device of the node
//	backend drain|quarantine|restore NODE ADDR[:PORT] [NS/NAME]
//	                              what an operator says of a backend on a node
//	restart NODE                  its proxy ends, and another one starts
//
// The keys of config and their defaults are
//
//	detectLocal=ClusterCIDR:10.244.0.0/16,fd00:10:244::/48
//	    or NodeCIDR, BridgeInterface:DEVICE, InterfaceNamePrefix:PREFIX, none;
//	    pod M uses the device podM of its node, all other packets eth0
//	serviceCIDRs=10.96.0.0/16,fd00:10:96::/112
//	    or none if unknown; objects of the cluster, not an option
//	nodePortAddresses=default     all, or a list of CIDRs and keywords
//	localhostNodePorts=false      if nodePortAddresses includes loopback
//	masqueradeAll=false
//	allowServiceExternalIPs=true
//	strictSourceRanges=false
//
// Objects are not defaulted, except for two fields: namespace is default, and
// clusterIP is the first of clusterIPs. An applied Node without addresses or
// podCIDRs keeps the declared ones. Its labels are replaced, so the zone must be
// repeated. A Pod is one that was declared: its node and addresses are known. It runs, if it has no phase.
//
// # Reachability
//
//	reach pod|client|host NAME -> TARGET [via NODE] : EXPECTATION
//
// A target is an address and port, or NAME:PORT for the IPv4 address of a
// node, pod or client and [NAME]:PORT for the IPv6 one, then /udp or /sctp
// if it is not TCP. Via names the node to which the network routes a client's
// packets for the target; by default, these are the nodes that announce or own
// the address. Expectations are
//
//	backends NAME[,NAME]... [source WHO] [sticky[=LABEL]]
//	    all of these answer, and no others. They see WHO as their client:
//	    "client" is the caller; a node is any address of that node, or of the
//	    caller if the backend is on that node; "any", the default, allows any
//	    address. A backend that calls itself may always see any address.
//	    Sticky: one of these answers, the same every time. Expectations with
//	    the same label expect the same backend.
//	refused
//	    the connection is refused at once.
//	no-answer
//	    the client gets no packet. A tier that acts at the client's socket
//	    cannot do that: there the call may fail at once, but not as refused.
//	passes
//	    no proxy handles the call. The owner of the address refuses or
//	    answers; without an owner, there is no answer.
//
// Every call is a new connection from another port. A long-lived connection is
//
//	flow LABEL pod|client|host NAME -> TARGET [via NODE] : EXPECTATION
//	flow LABEL : EXPECTATION
//
// The first form opens a connection, or sends a first datagram. The second form
// sends another request over it. One of the backends answers; "same" is the one
// that answered last time. If the socket of a datagram flow has an error, its
// client opens another one at the same port.
//
// # Text
//
//	table NODE FILE               Table.Dump of that node
//	changes NODE FILE             service ports whose decision the last event
//	                              changed
//	healthcheck NODE NS/NAME [ipv4=N] [ipv6=N] | none
//	problem KIND NS/NAME FIELD REASON
//
// Changes are sorted by name: "added" and "removed" show the whole decision,
// "changed" shows removed lines after a minus and added ones after a plus. Problems
// are those reported so far, with - for no field. Reported problems without
// a line fail the scenario at its end. Runners without access to tables skip all of
// these commands. They also skip calls that they cannot make, and log the reason.
//
// go test ./test/scenarios -update rewrites the expected texts. Compare the result
// with the statements: an expectation that repeats the code proves nothing.
package scenarios
