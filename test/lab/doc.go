// SPDX-License-Identifier: Apache-2.0

// Package lab plays a small cluster on one kernel, for privileged tests and for
// the demo.
//
// A node is a network namespace plus a cgroup2 subtree, a pod is another
// namespace plus a cgroup below its node's, a client is a namespace outside every
// node's cgroup. Links are veth pairs, routes are the plain host routes a simple
// CNI would install, and both address families always work.
//
//	l := lab.NewT(t)
//	n1, n2 := l.Node("node1"), l.Node("node2")
//	web, shell := n1.Pod("web"), n2.Pod("shell")
//	web.ServeTCP(80)
//	reply, err := shell.Ask(ctx, "tcp", netip.AddrPortFrom(web.Addr4, 80))
//
// # Address plan
//
//	172.18.0.N       fd00:18::N             node N (1…250), device eth0
//	172.18.255.254   fd00:18::ffff          fabric: default gateway of the nodes
//	10.244.N.0/24    fd00:10:244:N::/64     pods of node N
//	10.244.N.M       fd00:10:244:N::M       pod M (1…250) of node N, device eth0
//	10.244.N.254     fd00:10:244:N::ffff    node end of each pod link
//	198.51.100.K     2001:db8:51:100::K     client K (1…250), device eth0
//	198.51.100.254   2001:db8:51:100::ffff  fabric end of each client link
//	10.96.0.0/16     fd00:10:96::/112       Services; on no device
//	203.0.113.0/24   2001:db8:203:113::/64  external and load-balancer addresses;
//	                                        on no device, see Lab.Announce
//
// IPv6 groups are hexadecimal, so node 10 is fd00:18::a.
//
// # Untranslated Service traffic
//
// Pods and nodes have a default route to the fabric, whose own default route is a
// blackhole in both families. The fabric therefore drops untranslated packets to Service
// addresses without an ICMP error: the client times out, which differs from both
// a refusal and an answer. A node likewise drops packets to unused addresses of its
// pod range.
//
// # Nodes of real clusters
//
// By default, a node of the lab has only routes. NodeSettings, set in Options for all
// nodes or with Node.Set for one, add what filters packets in real clusters:
// conntrack, a FORWARD policy, rules about invalid packets, masquerading, and the
// reverse path filter. All but the last are iptables rules.
//
// # Packets
//
// Ask sends a request, Bulk transfers megabytes in both directions, and Echo sends
// datagrams that need fragmentation. All of them check the received data. Ping needs no
// server. Send transmits any packet of package packet, and Capture records the packets
// of a device:
//
//	seen, err := web.Capture(lab.Uplink, nil)
//	err = client.Send(ctx, packet.NewTCP(from, to, packet.SYN, nil))
//	syn, err := seen.Expect(ctx, func(c lab.Captured) bool { return c.Destination() == to })
//
// SetMTU, Down and Unplug change links under traffic.
//
// # Processes
//
// Command runs a program in a sandbox. Watch keeps its output and shows it if the test
// fails. Await fails at once if the process has exited. Get and Fetch send requests to
// its HTTP servers.
//
//	p := lab.Watch(n.Command(ctx, binary))
//	p.Begin(t)
//	p.Await(t, time.Minute, "the first sync", p.Says("Synced"))
//	body, err := n.Fetch(ctx, 10256, "/healthz")
//	p.Terminate(t)
//
// # Cgroups
//
//	<cgroup2>/tandem-lab-<pidns>-<pid>-<start>/  domain; holds the lab's own process
//	    lab0/                                    threaded, as everything below
//	        node1/                               Node.CgroupPath: attach programs here
//	            system/                          the node's own processes and threads
//	            kubepods/pod<Pod.UID>/           Pod.CgroupPath
//	        clients/outside/                     Client.CgroupPath
//
// One process plays all nodes: each sandbox has OS threads that sit in its
// namespace and its cgroup, and a socket belongs to the cgroup of the thread
// that creates it. That is only possible in threaded cgroups, and all threads of a
// process must stay within one threaded domain, hence the common root into which
// the whole process moves while a lab is open. A process can not be cloned straight
// into a threaded cgroup (EOPNOTSUPP), but a child inherits namespace and cgroup
// of the thread that forks it, so commands are simply forked by a sandbox thread.
//
// Namespaces have no name: file descriptors, threads and processes hold them, so
// the kernel drops them with everything inside as soon as the lab's process ends,
// however it ends. Only cgroup directories can be left behind by a killed process;
// Sweep removes them, and New calls it.
package lab
