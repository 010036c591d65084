// SPDX-License-Identifier: Apache-2.0

package ipvs

import "github.com/tandem-proxy/tandem/proxier"

// kind is what differs between kinds of frontends with an address of their own.
type kind struct {
	// masqueraded and kept are the sets that hold the address of a frontend which hides
	// clients outside from its endpoints, and of one which does not. The first one
	// holds it for ICMP echo requests also.
	masqueraded, kept []setName
	// foreign says that the address may be that of another machine. With announced, strict ARP
	// says that it is not: a load balancer's address is then meant to be on all nodes.
	foreign, announced bool
}

// kindOf has a row for each kind but wildcards, whose sets depend on the protocol.
var kindOf = map[proxier.Kind]kind{
	proxier.ClusterIP:    {masqueraded: []setName{clusterIP}, kept: []setName{clusterIP}},
	proxier.LoadBalancer: {masqueraded: []setName{loadBalancer}, kept: []setName{loadBalancer, loadBalancerLocal}, foreign: true, announced: true},
	proxier.ExternalIP:   {masqueraded: []setName{externalIP}, kept: []setName{externalIPLocal}, foreign: true},
	proxier.HostIP:       {masqueraded: []setName{externalIP}, kept: []setName{externalIPLocal}, foreign: true},
}

func (k kind) sets(keepsClient bool) []setName {
	if keepsClient {
		return k.kept
	}
	return k.masqueraded
}

// nodePortSets are the sets of a protocol: all NodePorts, and those that keep the client's source.
var nodePortSets = map[proxier.Protocol][2]setName{
	proxier.TCP:  {nodePortTCP, nodePortLocalTCP},
	proxier.UDP:  {nodePortUDP, nodePortLocalUDP},
	proxier.SCTP: {nodePortSCTP, nodePortLocalSCTP},
}
