// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// Hook is where a program of the socket layer is attached.
type Hook struct {
	Program string
	Attach  ciliumebpf.AttachType
}

// Hooks are where the programs of the socket layer are attached.
var Hooks = [...]Hook{
	{"tdm_connect4", ciliumebpf.AttachCGroupInet4Connect},
	{"tdm_connect6", ciliumebpf.AttachCGroupInet6Connect},
	{"tdm_sendmsg4", ciliumebpf.AttachCGroupUDP4Sendmsg},
	{"tdm_sendmsg6", ciliumebpf.AttachCGroupUDP6Sendmsg},
	{"tdm_recvmsg4", ciliumebpf.AttachCGroupUDP4Recvmsg},
	{"tdm_recvmsg6", ciliumebpf.AttachCGroupUDP6Recvmsg},
	{"tdm_getpeer4", ciliumebpf.AttachCgroupInet4GetPeername},
	{"tdm_getpeer6", ciliumebpf.AttachCgroupInet6GetPeername},
	{"tdm_post_bind4", ciliumebpf.AttachCGroupInet4PostBind},
	{"tdm_post_bind6", ciliumebpf.AttachCGroupInet6PostBind},
	{"tdm_signal", ciliumebpf.AttachCGroupSockOps},
	{"tdm_guard", ciliumebpf.AttachCGroupInetEgress},
}

// GuardHook is the index of the program that checks each packet that sockets send. That is
// costly, so it is attached only while source ranges admit some pods and not others.
const GuardHook = len(Hooks) - 1

// SignalHook is the index of the program that watches TCP connections. It is loaded only where that is asked for.
const SignalHook = GuardHook - 1

// SocketPrograms are loaded programs in the order of the hooks; nil where the kernel
// has no such hook.
type SocketPrograms [len(Hooks)]*ciliumebpf.Program

func (p *SocketPrograms) close() {
	for _, program := range p {
		program.Close()
	}
}

// SocketConstants are the load-time constants of bpf/lb_config.h.
type SocketConstants struct {
	HostNetNSCookie uint64
	// Left are the clients whose sockets are not translated, by origin.
	Left             proxier.Clients
	ProtectNodePorts bool
	// TCPPeerIsEndpoint leaves TCP sockets the endpoint's address as their peer.
	TCPPeerIsEndpoint bool
	HaveSetRetval     bool
	// Signals has the connections of sockets watched.
	Signals bool
}

// LoadSocketSpec is the collection of socket programs, with sizes and constants set.
func LoadSocketSpec(s lbmap.Sizes, c SocketConstants) (*ciliumebpf.CollectionSpec, error) {
	spec, err := lbmap.SocketSpec()
	if err != nil {
		return nil, err
	}
	for name, size := range lbmap.TableSizes(s) {
		spec.Maps[name].MaxEntries = size
	}
	for name, value := range map[string]any{
		"host_netns_cookie":  c.HostNetNSCookie,
		"left_pods":          boolByte(c.Left[proxier.FromPod]),
		"left_host":          boolByte(c.Left[proxier.FromHost]),
		"protect_node_ports": boolByte(c.ProtectNodePorts),
		"remember_tcp":       boolByte(!c.TCPPeerIsEndpoint),
		"have_set_retval":    boolByte(c.HaveSetRetval),
		"signal_bounds_us":   lbmap.SignalBounds,
	} {
		if err := spec.Variables[name].Set(value); err != nil {
			return nil, fmt.Errorf("set %s: %w", name, err)
		}
	}
	if !c.Signals {
		delete(spec.Programs, Hooks[SignalHook].Program)
	}
	return spec, nil
}

func boolByte(b bool) uint8 {
	if b {
		return 1
	}
	return 0
}
