// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/packet"
)

// Hook is the program that handles a packet.
type Hook int

// The hooks of a device.
const (
	In Hook = iota
	Out
)

func (h Hook) String() string { return [...]string{"in", "out"}[h] }

// Return values of programs.
const (
	Next     = -1
	Shot     = 2
	Redirect = 7
)

// Result is the result of a program for a packet.
type Result struct {
	Verdict int32
	Frame   []byte
}

// Node is the programs' configuration of their node.
type Node struct {
	// L2 is the length of the link-layer header, and MAC the device's address in it.
	L2  int
	MAC packet.MAC
	// Pod says that the device belongs to a pod, with clients behind it. FromPod says that
	// these are pods, regardless of their addresses.
	Pod, FromPod bool
	// Route returns the node's route to an address; false for none.
	Route func(to netip.Addr) (Route, bool)
	// New flows are refused while KeptTCP or KeptUDP are established. Young flows are evicted
	// by younger ones, and closed flows by other closed ones.
	KeptTCP, KeptUDP, Young, Over int
	// SourcePort reports whether a connection can get that source port.
	SourcePort func(port uint16) bool
	// Seen returns the second in which the programs saw the last packet of a request's flow.
	Seen func(request Tuple) uint32

	// Direct is what the node knows for direct server return.
	Direct Direct
}

// Route is a route to an address.
type Route struct {
	Uplink bool       // through a device to other nodes
	Source netip.Addr // source address of the node
	MTU    int
}

func (n *Node) limit(protocol uint8) int {
	if protocol == packet.ProtoTCP {
		return n.KeptTCP
	}
	return n.KeptUDP
}

// Model has the programs' state, and predicts what they must do.
type Model struct {
	node     Node
	rules    proxier.NodeRules
	services []*proxier.Decision
	backends []backend
	added    int

	flows     []*Flow
	young     ring // in the order of creation
	over      ring // in the order of closing
	fragments map[fragment]Tuple
	sources   map[Tuple]netip.AddrPort // of what is around packets to other nodes
	affinity  map[affinityKey]backend
	draining  bool
	// hadOptions says that packets came with IP options of other nodes.
	hadOptions bool
	// Counted are packets by reason; foreign packets have none.
	Counted map[string]uint64

	made func(request Tuple) (reply Tuple, ok bool)
	got  Result // for the present packet
}

// fragment has the fields that all fragments of a packet share.
type fragment struct {
	src, dst netip.Addr
	protocol uint8
	id       uint32
}

// New makes a model without Services. made returns the reply tuple of the flow that the
// programs have just created for a request.
func New(node Node, made func(request Tuple) (reply Tuple, ok bool)) *Model {
	return &Model{
		node: node, made: made, young: ring{places: make([]*Flow, node.Young)}, over: ring{places: make([]*Flow, node.Over)},
		fragments: map[fragment]Tuple{}, sources: map[Tuple]netip.AddrPort{}, affinity: map[affinityKey]backend{}, Counted: map[string]uint64{},
	}
}

// outcome is the expected result for a packet.
type outcome struct {
	verdict int32
	reason  string
	*editor
	// trailerMayGo: the frame's padding may be removed.
	trailerMayGo bool
	// noRoute: an answer has no route, which is counted in addition.
	noRoute bool
}

// Check returns what is wrong with a program's result for a frame, and updates the model's
// state.
func (m *Model) Check(hook Hook, frame []byte, got Result) error {
	m.got = got
	want, err := m.run(hook, frame)
	if err != nil {
		return err
	}
	if want.reason != "" {
		m.Counted[want.reason]++
	}
	if want.noRoute {
		m.Counted["DROP_NO_ROUTE"]++
	}
	return m.compare(&want, got)
}

// compare returns what is wrong with a result.
func (m *Model) compare(want *outcome, got Result) error {
	if got.Verdict != want.verdict {
		return fmt.Errorf("verdict %d, want %d (%s)", got.Verdict, want.verdict, want.reason)
	}
	if want.verdict == Shot { // the packet is not visible
		return nil
	}
	result := got.Frame
	if want.trailerMayGo && len(result) > len(want.frame) {
		result = result[:len(want.frame)]
	}
	if !want.equal(result) {
		return fmt.Errorf("the result is\n%s\nwant\n%s", m.text(result), m.text(want.frame))
	}
	return nil
}

// text formats a frame: its layers, and its first bytes.
func (m *Model) text(frame []byte) string {
	p := packet.Parse(frame)
	if m.node.L2 == 0 {
		p = packet.ParseIP(frame)
	}
	return fmt.Sprintf("%v\n%x", p, frame[:min(len(frame), 160)])
}

// pass is the outcome for foreign packets.
func pass(frame []byte) outcome { return outcome{verdict: Next, editor: &editor{frame: frame}} }

func passFor(reason string, frame []byte) outcome {
	return outcome{verdict: Next, reason: reason, editor: &editor{frame: frame}}
}

func drop(reason string) outcome {
	return outcome{verdict: Shot, reason: reason}
}

// run handles a packet.
func (m *Model) run(hook Hook, frame []byte) (outcome, error) {
	h, result := parse(frame, m.node.L2)
	if hook == In && h.l3 > 0 && !m.isForUs(packet.MAC(frame[:6])) {
		return pass(frame), nil
	}
	if hook == In {
		if u := m.unwrap(h, result); u != nil {
			h, result, frame = u, understood, u.frame
		}
	}
	switch result {
	case foreign:
		return pass(frame), nil
	case broken:
		return passFor("PASS_HEADERS", frame), nil
	}
	if h.isICMP() {
		switch {
		case h.place != whole:
			return passFor("PASS_FRAGMENT", frame), nil
		case h.isError():
			return m.followError(hook, h), nil
		case h.wrapper != nil:
			return m.answerProbe(h), nil
		case hook == In && h.isEcho():
			return m.answerEcho(h), nil
		}
		return pass(frame), nil
	}
	if !m.followFragment(h) {
		return passFor("PASS_FRAGMENT", frame), nil
	}
	f, reply := m.find(h.tuple)
	if f != nil && !m.here(hook, f, reply) {
		return pass(frame), nil
	}
	if f != nil && !reply && m.isOver(f, h) {
		f.over, f = true, nil
	}
	if f != nil && h.isElsewhere(f, reply) {
		return m.reject(h), nil
	}
	if f == nil && hook == In {
		if t := m.translated(h); t != nil {
			m.account(t, false, h)
			return passFor("FORWARD_LOCAL", frame), nil
		}
	}
	if f == nil && (hook == Out || !m.isForService(h)) {
		var err error
		if f, err = m.remap(hook, h); err != nil {
			return outcome{}, err
		}
	}
	if f == nil {
		if hook == Out || h.place == laterFragment {
			return m.ofNoFlow(h), nil
		}
		made, out, err := m.begin(h)
		if made == nil {
			return out, err
		}
		f = made
	}
	m.account(f, reply, h)
	return m.follow(f, reply, h), nil
}

// followFragment notes the ports of a first fragment, and gives them to later ones; false if they
// are not known.
func (m *Model) followFragment(h *header) bool {
	id := fragment{h.src, h.dst, h.protocol, h.fragmentID}
	switch h.place {
	case firstFragment:
		m.fragments[id] = h.tuple
	case laterFragment:
		known, ok := m.fragments[id]
		h.tuple = known
		return ok
	}
	return true
}

// ofNoFlow leaves a packet to the stack, unless it came in one of another node: the stack would send
// it on.
func (m *Model) ofNoFlow(h *header) outcome {
	if h.wrapper != nil {
		return drop("DROP_NO_TARGET")
	}
	return pass(h.frame)
}

// isForUs reports whether the programs handle an incoming frame. A pod may send to the bridge
// that its device is a port of.
func (m *Model) isForUs(to packet.MAC) bool {
	return to == m.node.MAC || m.node.Pod && to[0]&1 == 0
}

// here reports whether a direction of a flow is translated at a hook: replies of backends on
// other nodes are incoming packets, those of this node are outgoing ones.
func (m *Model) here(hook Hook, f *Flow, reply bool) bool {
	if f.Remapped && f.at == Out {
		return (hook == In) == reply
	}
	return (hook == In) == (!reply || f.Remote)
}

// begin selects a backend for the first packet of a connection.
func (m *Model) begin(h *header) (*Flow, outcome, error) {
	client, vip := h.src, h.dst
	d, frontend := m.frontend(h)
	if d == nil {
		switch {
		case !contains(m.rules.Unserved, vip) || m.isLocal(vip):
			return nil, m.ofNoFlow(h), nil
		case isMartian(client):
			return nil, passFor("PASS_MARTIAN", h.frame), nil
		}
		return nil, m.reject(h), nil
	}
	if isMartian(client) {
		return nil, passFor("PASS_MARTIAN", h.frame), nil
	}
	switch {
	case h.flags()&packet.RST == 0:
	case h.wrapper != nil:
		return nil, m.ofNoFlow(h), nil
	default:
		return nil, passFor("PASS_RST", h.frame), nil
	}
	if !frontend.Admits(client) {
		if frontend.RejectOthers {
			return nil, m.rejectFor("DROP_SOURCE_RANGE", h), nil
		}
		return nil, drop("DROP_SOURCE_RANGE"), nil
	}
	route := frontend.Routes[m.origin(client)]
	set := route.Set
	list := eligible(d, set)
	switch target := m.target(d, h); {
	case target != nil && !(h.isBound() && !h.isSelected(target.Addr)):
		list = []proxier.Backend{*target}
	case h.isBound() && h.flags()&(packet.SYN|packet.ACK) == packet.SYN: // nodes may agree when it is repeated
		return nil, drop("DROP_NO_TARGET"), nil
	case h.isBound():
		return nil, m.reject(h), nil
	}
	if len(list) == 0 {
		if d.Empty[set] == proxier.Drop {
			return nil, drop("DROP_POLICY"), nil
		}
		return nil, m.reject(h), nil
	}
	if _, ok := m.made(h.tuple); !ok {
		if m.Kept(h.protocol) >= m.node.limit(h.protocol) {
			return nil, drop("DROP_NO_FLOW"), nil
		}
		if out, there := m.obstacle(h, frontend, route, list); there {
			return nil, out, nil
		}
		if h.isBound() && m.isTaken(Tuple{list[0].Addr, h.tuple.Src, h.protocol}) || m.isFull(h, frontend, route, list) {
			return nil, m.rejectFor("REJECT_NO_PORT", h), nil
		}
	}
	f, err := m.make(h, d, frontend, route, list)
	return f, outcome{}, err
}

// obstacle returns why a packet cannot be sent to one of the backends: the one that fits what
// the programs did, as any may have been picked.
func (m *Model) obstacle(h *header, f *proxier.Frontend, route proxier.Route, list []proxier.Backend) (out outcome, there bool) {
	for _, b := range list {
		this, is := m.obstacleTo(h, f, route, b)
		if is && (!there || m.compare(&this, m.got) == nil) {
			out, there = this, true
		}
	}
	return out, there
}

// obstacleTo returns why a packet cannot be sent to a backend.
func (m *Model) obstacleTo(h *header, f *proxier.Frontend, route proxier.Route, b proxier.Backend) (outcome, bool) {
	way, routed := m.node.Route(b.Addr.Addr())
	if !routed && b.Remote && (!m.node.Pod || route.Source == proxier.Masquerade) && !m.isLocal(b.Addr.Addr()) {
		return drop("DROP_NO_ROUTE"), true
	}
	if _, own := m.ownSource(h, route, b); !own {
		return outcome{}, false
	}
	if !routed {
		return drop("DROP_NO_ROUTE"), true
	}
	if h.ttl <= 1 {
		return m.timeExceeded(h), true
	}
	if mtu := way.MTU - m.overhead(h, m.isDirect(h, f, route, b)); h.end-h.l3 > mtu {
		return m.tooBig(h, mtu), true
	}
	return outcome{}, false
}

// isFull reports whether one of the backends has no free source port.
func (m *Model) isFull(h *header, f *proxier.Frontend, route proxier.Route, list []proxier.Backend) bool {
	return slices.ContainsFunc(list, func(b proxier.Backend) bool {
		if m.isDirect(h, f, route, b) {
			return false // its replies do not come by
		}
		reply, free := m.replyTo(h, route, b)
		for port := 1024; !free && port < 1<<16; port++ {
			reply.Dst = netip.AddrPortFrom(reply.Dst.Addr(), uint16(port))
			free = m.node.SourcePort(uint16(port)) && !m.isUsed(reply)
		}
		return !free
	})
}

// replyTo returns the tuple of a backend's reply to a client; false if its destination must
// get another port.
func (m *Model) replyTo(h *header, route proxier.Route, b proxier.Backend) (reply Tuple, ok bool) {
	reply = Tuple{b.Addr, h.tuple.Src, h.protocol}
	if source, own := m.ownSource(h, route, b); own {
		reply.Dst = netip.AddrPortFrom(source, 0)
		return reply, false
	}
	return reply, !m.isUsed(reply)
}

// ownSource returns the node's address that a backend sees as the client, if masquerading is
// necessary: replies would bypass the node, the client is the backend itself, or a pod must
// be masqueraded.
func (m *Model) ownSource(h *header, route proxier.Route, b proxier.Backend) (source netip.Addr, own bool) {
	way, remote := m.remote(b)
	switch {
	case !m.node.Pod:
		return way.Source, remote
	case b.Addr.Addr() == h.src:
		return m.rules.NodeIPs[proxier.FamilyOf(h.src)], true
	}
	return way.Source, remote && route.Source == proxier.Masquerade
}

// remote reports whether a backend is behind an uplink, and returns the route to it.
func (m *Model) remote(b proxier.Backend) (Route, bool) {
	way, routed := m.node.Route(b.Addr.Addr())
	return way, !b.Local && !m.isLocal(b.Addr.Addr()) && routed && way.Uplink
}

// make accepts the flow that the programs made, if its backend is eligible.
func (m *Model) make(h *header, d *proxier.Decision, frontend *proxier.Frontend, route proxier.Route, list []proxier.Backend) (*Flow, error) {
	reply, ok := m.made(h.tuple)
	if !ok {
		return nil, fmt.Errorf("no flow was made for %v", h.tuple)
	}
	f := &Flow{Request: h.tuple, Reply: reply}
	at := slices.IndexFunc(list, func(b proxier.Backend) bool { return b.Addr == reply.Src })
	if at < 0 {
		return nil, fmt.Errorf("%s is no backend of %v, want one of %v", reply.Src, h.tuple, list)
	}
	chosen := list[at]
	at = slices.IndexFunc(m.backends, func(b backend) bool { return b.service == d.Name && b.addr == chosen.Addr })
	f.backend = m.backends[at]
	if h.wrapper != nil {
		f.wrapped = h.wrapper.dispatch
	}
	// Another node selected a target.
	if m.target(d, h) == nil {
		if err := m.checkAffinity(h, d, list, f.backend); err != nil {
			return nil, err
		}
	}
	f.Direct = m.isDirect(h, frontend, route, chosen)

	_, f.Remote = m.ownSource(h, route, chosen)
	if chosen.Remote && !f.Remote && (!m.node.Pod || route.Source == proxier.Masquerade) && !m.isLocal(chosen.Addr.Addr()) {
		m.Counted["PASS_NO_UPLINK"]++
	}
	if own := (Tuple{chosen.Addr, h.tuple.Src, h.protocol}); f.ownsPort() && !m.makeWay(own) {
		return nil, fmt.Errorf("a flow was made for %v, although %v are replies of another one", h.tuple, own)
	}
	want, ok := m.replyTo(h, route, chosen)
	if f.Direct {
		want.Dst, ok = netip.AddrPortFrom(want.Dst.Addr(), h.tuple.Src.Port()), true
	}
	if !ok {
		port := reply.Dst.Port()
		if want.Dst = netip.AddrPortFrom(want.Dst.Addr(), port); !m.node.SourcePort(port) {
			return nil, fmt.Errorf("invalid source port %d", port)
		}
	}
	if m.Kept(h.protocol) >= m.node.limit(h.protocol) {
		return nil, fmt.Errorf("a flow was made for %v, although as many are kept as may be", h.tuple)
	}
	if reply != want {
		return nil, fmt.Errorf("replies are expected as %v, want %v", reply, want)
	}
	if !f.Direct && m.isUsed(want) {
		return nil, fmt.Errorf("replies of two flows are expected as %v", want)
	}
	m.flows = append(m.flows, f)
	if m.young.add(f, stays) {
		m.Counted["PUSHED_OUT"]++
	}
	return f, nil
}

// isForService reports whether a packet is for a frontend, or rejected for its address.
func (m *Model) isForService(h *header) bool {
	d, _ := m.frontend(h)
	return d != nil || contains(m.rules.Unserved, h.dst) && !m.isLocal(h.dst)
}

// remap accepts the flow that the programs made for a connection to no Service, whose source port has
// the replies of another flow.
func (m *Model) remap(hook Hook, h *header) (*Flow, error) {
	begins := h.place != laterFragment && (h.protocol != packet.ProtoTCP || h.flags()&(packet.SYN|packet.ACK) == packet.SYN)
	looked := hook == Out || h.protocol == packet.ProtoTCP
	if m.node.Pod {
		looked = hook == In
	}
	other, reply := m.find(h.tuple.Reversed())
	if !begins || !looked || other == nil || !reply || m.here(hook, other, true) || other.ownsPort() && other.State&Closed == 0 {
		return nil, nil
	}
	made, ok := m.made(h.tuple)
	if !ok {
		return nil, nil
	}
	want := h.tuple.Reversed()
	want.Dst = netip.AddrPortFrom(want.Dst.Addr(), made.Dst.Port())
	if made != want || !m.node.SourcePort(made.Dst.Port()) || m.isUsed(want) {
		return nil, fmt.Errorf("replies are expected as %v, want %v with another port", made, want)
	}
	f := &Flow{Request: h.tuple, Reply: made, Remapped: true, at: hook}
	m.flows = append(m.flows, f)
	if m.young.add(f, stays) {
		m.Counted["PUSHED_OUT"]++
	}
	return f, nil
}

// checkAffinity checks that a client keeps its backend while that is eligible.
func (m *Model) checkAffinity(h *header, d *proxier.Decision, list []proxier.Backend, chosen backend) error {
	if d.Affinity == 0 {
		return nil
	}
	key := affinityKey{d.Name, proxier.FamilyOf(h.dst), h.src}
	last, ok := m.affinity[key]
	m.affinity[key] = chosen
	isEligible := slices.ContainsFunc(list, func(b proxier.Backend) bool { return b.Addr == last.addr })
	if ok && m.serves(last) && isEligible && chosen != last {
		return fmt.Errorf("client %s has backend %s, and had %s", h.src, chosen.addr, last.addr)
	}
	return nil
}

// isUsed reports whether a tuple belongs to a flow.
func (m *Model) isUsed(t Tuple) bool {
	f, _ := m.find(t)
	return f != nil
}
