// SPDX-License-Identifier: Apache-2.0

// Package scenarios holds the semantics of Services as scripts: a small
// cluster, objects in YAML, a sequence of events, and what is to be seen. The
// scripts know nothing of how Services are carried, so the same files are
// replayed on the decision table alone, by Model, and on real traffic by every
// tier.
//
// A scenario is a txtar file. Its comment is the script, one command per line;
// its files are objects and expected texts. This is one:
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
// The first comment line is the title, the last one of the same block the
// statements that the scenario shows, by their numbers in docs/semantics.md.
// Files are kept as Format writes them.
//
// # The cluster
//
//	node NAME [zone=ZONE]
//	pod NAME NODE
//	client NAME
//
// declare it, in this order and before everything else. Addresses follow the
// plan of package lab: node N is 172.18.0.N and fd00:18::N, pod M of it
// 10.244.N.M and fd00:10:244:N::M, client K 198.51.100.K and 2001:db8:51:100::K,
// each numbered from 1 as declared. ClusterIPs are out of 10.96.0.0/16 and
// fd00:10:96::/112, addresses of load balancers and external IPs out of
// 203.0.113.0/24 and 2001:db8:203:113::/64. A pod that uses the network of its
// host is an endpoint with an address of the node: it answers under the node's
// name. Pods and nodes answer on every address and port that an EndpointSlice
// of the scenario ever names; see Listeners.
//
// # Events
//
//	config KEY=VALUE...           of every proxy; what is not named stays
//	apply FILE                    Services, EndpointSlices and Nodes, at once
//	delete service NS/NAME
//	delete endpointslice NS/NAME
//	announce PREFIX [NODE]...     the network leads a prefix to these nodes
//	address add|del NODE ADDR     of a device of the node
//	restart NODE                  its proxy ends, and another one starts
//
// The keys of config and their defaults are
//
//	detectLocal=ClusterCIDR:10.244.0.0/16,fd00:10:244::/48
//	    or NodeCIDR, BridgeInterface:DEVICE, InterfaceNamePrefix:PREFIX, none;
//	    pod M is behind the device podM of its node, all else comes by eth0
//	serviceCIDRs=10.96.0.0/16,fd00:10:96::/112
//	    or none, if they are not known; objects of the cluster, not an option
//	nodePortAddresses=default     all, or a list of CIDRs and keywords
//	localhostNodePorts=false      where the selection allows it
//	masqueradeAll=false
//	allowServiceExternalIPs=true
//	strictSourceRanges=false
//
// Objects are used as they are written: no field gets a default but the
// namespace, which is default, and clusterIP, which is the first of clusterIPs.
// What an applied Node leaves out of addresses and podCIDRs is as it was
// declared; its labels are those applied, so that the zone has to be repeated.
//
// # Reachability
//
//	reach pod|client|host NAME -> TARGET [via NODE] : EXPECTATION
//
// A target is an address and port, or NAME:PORT for the IPv4 address of a
// node, pod or client and [NAME]:PORT for the IPv6 one, then /udp or /sctp
// if it is not TCP. Via names the node to which the network leads a client's
// packets for the target; else it is where the address is announced or at
// home. Expectations are
//
//	backends NAME[,NAME]... [source WHO] [sticky[=LABEL]]
//	    all of these answer, and no others. They see WHO as their client:
//	    client is whoever dials, a node any address of that node, or of the
//	    client where the backend is on that node, and any, or nothing,
//	    whatever it may be. A backend that dials itself may see any
//	    address in any case. Sticky: one of these answers, the same every time,
//	    and with a label the same as everywhere with that label.
//	refused
//	    the connection is refused at once.
//	no-answer
//	    the client is told nothing. A tier at the client's socket cannot keep
//	    silent: there the call may fail at once, but not as refused.
//	passes
//	    no proxy has to do with it. Who has the address refuses or answers; if
//	    nobody has it, there is no answer.
//
// Every call is a new connection from another port. One that lasts is
//
//	flow LABEL pod|client|host NAME -> TARGET [via NODE] : EXPECTATION
//	flow LABEL : EXPECTATION
//
// where the first form opens a connection, or sends a first datagram, and the
// second one speaks again over the same one. Of its backends one answers; same
// is the one that answered last time. If the socket of a datagram flow was
// broken, its client opens another one at the same port.
//
// # Text
//
//	table NODE FILE               Table.Dump of that node
//	changes NODE FILE             service ports about which the last event
//	                              brought another decision
//	healthcheck NODE NS/NAME [ipv4=N] [ipv6=N] | none
//	problem KIND NS/NAME FIELD REASON
//
// Changes are in the order of names: "added" and "removed" with the whole
// decision, "changed" with the lines that went, after a minus, and those that
// came, after a plus. Problems are the ones reported up to then, with - for no
// field; one that no line names is a failure at the end. A runner that cannot
// tell leaves all of these out: they are about the table. So it does with calls
// that it cannot make, and says why.
//
// go test ./test/scenarios -update rewrites the expected texts. Read what came
// out against the statements: an expectation that repeats the code proves
// nothing.
package scenarios
