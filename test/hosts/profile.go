// SPDX-License-Identifier: Apache-2.0

package hosts

import (
	"context"
	"maps"
	"slices"

	"github.com/tandem-proxy/tandem/capabilities"
)

// Profile is a host with its network and its CNI.
type Profile struct {
	Name string
	// Like says which clusters have such hosts.
	Like string
	// Short says that short test runs play it as well.
	Short bool
	// Kinds are kinds of devices, as in ip link add type KIND, that not every kernel has.
	Kinds []string
	// Tools are programs that not every machine has.
	Tools []string
	// Families that it has; both if empty.
	Families []Family

	// MTU of the network, 1500 if zero, and of the pods' devices, the same if zero.
	MTU, PodMTU int
	// Wires are further links, Tunnels pairs of TUN devices.
	Wires, Tunnels []Wire
	// Fabric is the router between everything, Node the node under test, Other another node.
	Fabric, Node, Other Setup
	// Clients are further ones outside the cluster, by name.
	Clients map[string]Client
	// Daemons starts what connects the nodes, if Fabric, Node and Other do not say it all, before pods are attached.
	Daemons func(context.Context, *World) error
	// Unattached says that the lab does not attach the pods, so that Pods must do it.
	Unattached bool
	// Pods are attached so.
	Pods Attachment
	// ClientPod is done in the client's pod after that.
	ClientPod Setup
	// Foreign says that another project has programs on the node's card and the pods' devices.
	Foreign bool
	// PodAddresses are formats of the pods' addresses, with a number, if they are not those of
	// the lab.
	PodAddresses map[Family]string
	// NodeServes says that a process on the node listens at the ports of the Services, and
	// Answers by what cells are answered that are not answered by endpoints.
	NodeServes bool
	// SidecarPort is where a process in the client's pod listens, if there is one. It answers, or
	// with ForwardMark connects to where the client wanted to, with that mark.
	SidecarPort uint16
	ForwardMark int
	Answers     []Answer
	// OptedOut says that the pods' namespace opts out of socket load balancing.
	OptedOut bool
	// Crowd is the number of connections of cells of kind Crowd, if there are any.
	Crowd int
	// Gap takes the routes to the other node away for cells of kind Gap, and Back restores them.
	Gap, Back Setup
	// Needs are features of the kernel without which the proxy cannot do what netfilter does, or the profile means nothing.
	Needs []capabilities.Feature
	// PodCIDRs are the pods' ranges if they are not those of the lab.
	PodCIDRs string

	// Denied are cells that the host's policy forbids, whatever serves them.
	Denied []Exception
	// Neither are cells that netfilter does not keep either.
	Neither []Exception
	// Lost are cells that netfilter keeps and the proxy does not.
	Lost []Exception
}

// Answer says who answers some cells.
type Answer struct {
	Cells Cell
	By    string
}

// Machine names a network namespace for Wires: fabric, node, other, the client's pod, or a client.
type Machine string

// Wire is a pair of devices.
type Wire struct {
	A       Machine
	DeviceA string
	B       Machine
	DeviceB string
}

// Client is a machine outside the cluster.
type Client struct {
	Setup
	// NodePorts are the addresses of the node that it uses, one of each family; those of the
	// Node object if empty.
	NodePorts map[Family]string
	// Addresses are those from which it does so; those of the lab if empty.
	Addresses map[Family]string
}

// Attachment is what connects a pod, whose device is always eth0.
type Attachment struct {
	// CNI are the configurations of plugins, a list in JSON. They also choose the addresses.
	CNI string
	// Node and Pod are done for each pod, in the namespaces of the node and of the pod.
	Node, Pod Setup
}

// Setup configures a machine, in the order of its fields. All texts but sysctls may have
// placeholders; see World.fill.
type Setup struct {
	// Sysctls are lines like net.ipv4.conf.all.rp_filter=1.
	Sysctls []string
	// IP are lines for ip -batch.
	IP string
	// Each are lines for ip -4 -batch and ip -6 -batch.
	Each string
	// Late are sysctls of devices that did not exist before.
	Late []string
	// Rules is the input of iptables-restore and ip6tables-restore; Rules4 is for the former
	// alone. Both add to what is there.
	Rules, Rules4 string
	// NFT is the input of nft -f.
	NFT string
	// WireGuard is the input of wg setconf for device wg0.
	WireGuard string
}

func (p *Profile) families() []Family {
	if len(p.Families) == 0 {
		return []Family{IPv4, IPv6}
	}
	return p.Families
}

func (p *Profile) clients() []string {
	return append([]string{FromPod, FromHost, Outside}, slices.Sorted(maps.Keys(p.Clients))...)
}
