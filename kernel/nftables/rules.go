// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nftables

import (
	"context"
	"encoding/binary"
	"slices"

	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/inet"
	"github.com/tandem-proxy/tandem/kernel/netlink"
)

// Verdict is what a rule does with a packet.
type Verdict uint8

// The verdicts.
const (
	Continue Verdict = iota // with the next rule
	Accept
	Drop   // or reject, or hand over to a process, which may drop it
	Return // to the chain that jumped here
	Jump
	Goto
)

// Rule is a rule of nf_tables as far as it is about packets that begin a connection. Rules that
// match no such packet are left out: those about other TCP flags or states of conntrack, and reverse
// path filters, which are about the source.
type Rule struct {
	Chain  string
	Handle uint64
	// Match has all packets that the rule matches, and perhaps more: Exact says that it has
	// no more.
	Match inet.Match
	Exact bool
	// Verdict, and the chain that Jump and Goto lead to. A map of verdicts is a rule for each.
	Verdict Verdict
	Target  string
	// Status says that it depends on whether connections were translated (ct status, or the
	// state DNAT of iptables).
	Status bool

	verdicts string // the map that has them
	by       content
}

// Rules lists the rules of a chain in their order.
func Rules(ctx context.Context, family, table, chain string) (list []Rule, err error) {
	r := reader{family: family, table: table, sets: map[string]*set{}}
	of := netlink.Attr(nil, unix.NFTA_RULE_TABLE, append([]byte(table), 0))
	of = netlink.Attr(of, unix.NFTA_RULE_CHAIN, append([]byte(chain), 0))
	type raw struct {
		rule        Rule
		expressions []byte
	}
	var all []raw // sets are read by another socket afterwards
	err = dump(ctx, request(unix.NFT_MSG_GETRULE, familyNumber(family), of), func(m netlink.Message) error {
		if m.Kind != subsystem|unix.NFT_MSG_NEWRULE || len(m.Body) < genericLen {
			return nil
		}
		same, found := false, raw{}
		err := netlink.EachAttr(m.Body[genericLen:], func(kind uint16, v []byte) error {
			switch kind {
			case unix.NFTA_RULE_TABLE: // old kernels ignore the names of the request
				same = text(v) == table
			case unix.NFTA_RULE_CHAIN:
				found.rule.Chain = text(v)
			case unix.NFTA_RULE_HANDLE:
				if len(v) >= 8 {
					found.rule.Handle = binary.BigEndian.Uint64(v)
				}
			case unix.NFTA_RULE_EXPRESSIONS:
				found.expressions = append([]byte(nil), v...)
			}
			return nil
		})
		if same && found.rule.Chain == chain {
			all = append(all, found)
		}
		return err
	})
	for i := range all {
		if err != nil {
			break
		}
		rule := &all[i].rule
		var begins bool
		if begins, err = r.read(ctx, rule, all[i].expressions); err != nil || !begins {
			continue
		}
		if rule.verdicts == "" {
			list = append(list, *rule)
			continue
		}
		var s *set
		if s, err = r.set(ctx, rule.verdicts); err != nil {
			continue
		}
		for _, to := range s.verdicts {
			each := *rule
			each.Verdict, each.Target, each.Exact = to.verdict, to.target, false
			if m, some := to.match(rule.by); some {
				if each.Match, some = each.Match.And(m); some && !slices.ContainsFunc(list, each.equal) {
					list = append(list, each)
				}
			}
		}
	}
	if err != nil {
		return nil, fmt.Errorf("list rules of chain %s, table %s %s: %w", chain, family, table, err)
	}
	return list, nil
}

// equal compares two that were read of one table.
func (r *Rule) equal(o Rule) bool {
	return r.Chain == o.Chain && r.Handle == o.Handle && r.Verdict == o.Verdict && r.Target == o.Target && r.Match.Equal(&o.Match)
}

// reader reads the rules of a table.
type reader struct {
	family, table string
	sets          map[string]*set
}

// what a register of nf_tables holds.
type content uint8

const (
	unknown content = iota
	nfProtocol
	l4Protocol
	destination
	destinationPort
	tcpFlags
	connState
)

type register struct {
	content content
	v6      bool   // of a destination
	mask    []byte // nil for none
}

const (
	firstTCPFlags = 0x02     // of a packet that begins a connection: SYN
	firstStates   = 8 | 1<<6 // new and untracked, as nf_tables numbers the states
	xtNew         = 8        // as xt_conntrack does
	xtUntracked   = 1 << 8   // likewise
	xtSNAT        = 1 << 6   // translated, besides one of the other states
	xtDNAT        = 1 << 7
	fibSource     = 1 << 0    // NFTA_FIB_F_SADDR
	verdictReg    = uint32(0) // NFT_REG_VERDICT
)

// read reads the expressions of a rule. It begins if the rule matches packets that begin a
// connection.
func (r *reader) read(ctx context.Context, rule *Rule, expressions []byte) (begins bool, err error) {
	registers := map[uint32]register{}
	begins, rule.Exact = true, true
	narrow := func(by inet.Match) {
		m, some := rule.Match.And(by)
		if rule.Match = m; !some {
			begins = false
		}
	}
	switch r.family {
	case "ip":
		rule.Match.Not[inet.IPv6] = true
	case "ip6":
		rule.Match.Not[inet.IPv4] = true
	}
	err = netlink.EachAttr(expressions, func(_ uint16, expression []byte) error {
		var name string
		var data []byte
		err := netlink.EachAttr(expression, func(kind uint16, v []byte) error {
			switch kind {
			case unix.NFTA_EXPR_NAME:
				name = text(v)
			case unix.NFTA_EXPR_DATA:
				data = v
			}
			return nil
		})
		if err != nil {
			return err
		}
		a, err := attributes(data)
		if err != nil {
			return err
		}
		switch name {
		case "meta":
			to := register{}
			switch a.number(unix.NFTA_META_KEY) {
			case unix.NFT_META_NFPROTO:
				to.content = nfProtocol
			case unix.NFT_META_L4PROTO:
				to.content = l4Protocol
			}
			if _, loads := a[unix.NFTA_META_DREG]; loads {
				registers[a.number(unix.NFTA_META_DREG)] = to
			}
		case "payload":
			if _, loads := a[unix.NFTA_PAYLOAD_DREG]; loads {
				registers[a.number(unix.NFTA_PAYLOAD_DREG)] = payload(a.number(unix.NFTA_PAYLOAD_BASE), a.number(unix.NFTA_PAYLOAD_OFFSET), a.number(unix.NFTA_PAYLOAD_LEN), r.family)
			}
		case "ct":
			to := register{}
			switch a.number(unix.NFTA_CT_KEY) {
			case unix.NFT_CT_STATE:
				to.content = connState
			case unix.NFT_CT_STATUS:
				rule.Status = true
			}
			if _, loads := a[unix.NFTA_CT_DREG]; loads {
				registers[a.number(unix.NFTA_CT_DREG)] = to
			}
		case "fib":
			registers[a.number(unix.NFTA_FIB_DREG)] = register{}
			rule.Exact = false
			if a.number(unix.NFTA_FIB_FLAGS)&fibSource != 0 {
				begins = false
			}
		case "bitwise":
			from := registers[a.number(unix.NFTA_BITWISE_SREG)]
			from.mask = a.value(unix.NFTA_BITWISE_MASK)
			if from.mask == nil {
				from = register{}
			}
			registers[a.number(unix.NFTA_BITWISE_DREG)] = from
		case "cmp":
			from := registers[a.number(unix.NFTA_CMP_SREG)]
			m, exact, some := from.compare(a.number(unix.NFTA_CMP_OP), a.value(unix.NFTA_CMP_DATA))
			narrow(m)
			rule.Exact, begins = rule.Exact && exact, begins && some
		case "range":
			from := registers[a.number(unix.NFTA_RANGE_SREG)]
			low, high := a.value(unix.NFTA_RANGE_FROM_DATA), a.value(unix.NFTA_RANGE_TO_DATA)
			if from.content == destinationPort && a.number(unix.NFTA_RANGE_OP) == unix.NFT_RANGE_EQ && len(low) >= 2 && len(high) >= 2 {
				narrow(inet.Match{Ports: []inet.PortRange{{First: binary.BigEndian.Uint16(low), Last: binary.BigEndian.Uint16(high)}}})
			} else {
				rule.Exact = false
			}
		case "lookup":
			return r.lookup(ctx, rule, registers[a.number(unix.NFTA_LOOKUP_SREG)], a, narrow)
		case "immediate":
			if a.number(unix.NFTA_IMMEDIATE_DREG) == verdictReg {
				rule.Verdict, rule.Target = verdictIn(a[unix.NFTA_IMMEDIATE_DATA])
			}
		case "reject", "queue", "tproxy", "synproxy":
			rule.Verdict = Drop
		case "target":
			if IsDropTarget(text(a[unix.NFTA_TARGET_NAME])) {
				rule.Verdict = Drop
			}
		case "match":
			m, exact, some := xtMatch(text(a[unix.NFTA_MATCH_NAME]), a.number(unix.NFTA_MATCH_REV), a[unix.NFTA_MATCH_INFO], &rule.Status)
			narrow(m)
			rule.Exact, begins = rule.Exact && exact, begins && some
		case "counter", "log", "notrack":
		default:
			rule.Exact = false
		}
		return nil
	})
	return begins, err
}

// lookup narrows a rule by a set of ports, and finds maps of verdicts. Other sets are not read.
func (r *reader) lookup(ctx context.Context, rule *Rule, from register, a attrs, narrow func(inet.Match)) error {
	name := text(a[unix.NFTA_LOOKUP_SET])
	if _, maps := a[unix.NFTA_LOOKUP_DREG]; maps {
		if a.number(unix.NFTA_LOOKUP_DREG) == verdictReg {
			rule.verdicts = name
			if from.mask == nil {
				rule.by = from.content
			}
		}
		rule.Exact = false
		return nil
	}
	const inverted = 1 // NFT_LOOKUP_F_INV
	if from.content != destinationPort || from.mask != nil || a.number(unix.NFTA_LOOKUP_FLAGS)&inverted != 0 {
		rule.Exact = false
		return nil
	}
	s, err := r.set(ctx, name)
	if err != nil {
		return err
	}
	rule.Exact = rule.Exact && s.ports != nil
	narrow(inet.Match{Ports: s.ports})
	return nil
}

// payload is what a load from the packet gets.
func payload(base, offset, length uint32, family string) (r register) {
	switch {
	case base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && offset == 2 && length == 2:
		r.content = destinationPort
	case base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && offset == 13 && length == 1:
		r.content = tcpFlags
	case base != unix.NFT_PAYLOAD_NETWORK_HEADER:
	case offset == 9 && length == 1 && family != "ip6", offset == 6 && length == 1 && family == "ip6":
		r.content = l4Protocol
	case offset == 16 && length <= 4 && family != "ip6", offset == 24 && length <= 16 && family != "ip":
		r.content, r.v6 = destination, offset == 24 // a shorter load is a prefix of whole bytes
	}
	return r
}

// compare says which packets a comparison leaves, whether that is exact, and whether packets that
// begin a connection can be among them.
func (r register) compare(op uint32, data []byte) (m inet.Match, exact, some bool) {
	equal := op == unix.NFT_CMP_EQ
	switch {
	case len(data) == 0:
	case r.content == nfProtocol && equal && r.mask == nil:
		switch data[0] {
		case unix.NFPROTO_IPV4:
			return inet.Match{Not: [inet.Families]bool{inet.IPv6: true}}, true, true
		case unix.NFPROTO_IPV6:
			return inet.Match{Not: [inet.Families]bool{inet.IPv4: true}}, true, true
		}
	case r.content == l4Protocol && equal && r.mask == nil:
		return inet.Match{Protocol: inet.Protocol(data[0])}, true, true
	case r.content == destination && equal:
		if p, ok := prefixOf(data, r.mask, r.v6); ok {
			return inet.Match{Destinations: []netip.Prefix{p}}, true, true
		}
	case r.content == destinationPort && r.mask == nil && len(data) >= 2:
		if ports, ok := portsOf(op, binary.BigEndian.Uint16(data)); ok {
			if ports == nil {
				return m, true, false
			}
			return inet.Match{Ports: ports}, true, true
		}
	case r.content == tcpFlags && (equal || op == unix.NFT_CMP_NEQ):
		flags := byte(firstTCPFlags)
		if len(r.mask) > 0 {
			flags &= r.mask[0]
		}
		return m, false, (flags == data[0]) == equal
	case r.content == connState && len(data) >= 4 && (equal || op == unix.NFT_CMP_NEQ):
		states := binary.NativeEndian.Uint32(data)
		if len(r.mask) >= 4 { // "ct state a,b": one of the bits of the mask is set
			mask := binary.NativeEndian.Uint32(r.mask)
			first := mask&firstStates != 0
			if states == 0 {
				if equal { // none is set
					return m, false, mask&firstStates != firstStates
				}
				return m, false, first
			}
			return m, false, true
		}
		if equal {
			return m, false, states&firstStates != 0
		}
		return m, false, true
	}
	return m, false, true
}

// portsOf are the ports that compare so with one; nil for none.
func portsOf(op uint32, port uint16) (list []inet.PortRange, ok bool) {
	const last = 1<<16 - 1
	switch op {
	case unix.NFT_CMP_EQ:
		return []inet.PortRange{{First: port, Last: port}}, true
	case unix.NFT_CMP_LT:
		if port == 0 {
			return nil, true
		}
		return []inet.PortRange{{First: 0, Last: port - 1}}, true
	case unix.NFT_CMP_LTE:
		return []inet.PortRange{{First: 0, Last: port}}, true
	case unix.NFT_CMP_GT:
		if port == last {
			return nil, true
		}
		return []inet.PortRange{{First: port + 1, Last: last}}, true
	case unix.NFT_CMP_GTE:
		return []inet.PortRange{{First: port, Last: last}}, true
	}
	return nil, false
}

// attrs are the attributes of an expression.
type attrs map[uint16][]byte

func attributes(b []byte) (attrs, error) {
	a := attrs{}
	return a, netlink.EachAttr(b, func(kind uint16, v []byte) error {
		a[kind] = v
		return nil
	})
}

// number is 0 where it is missing.
func (a attrs) number(kind uint16) uint32 {
	n, err := number(a[kind])
	if err != nil {
		return 0
	}
	return n
}

// value is that of a nested NFTA_DATA_VALUE; nil for none.
func (a attrs) value(kind uint16) []byte {
	nested, err := attributes(a[kind])
	if err != nil {
		return nil
	}
	return nested[unix.NFTA_DATA_VALUE]
}

// verdictIn reads the data of an immediate expression, or of an element of a map.
func verdictIn(data []byte) (Verdict, string) {
	nested, err := attributes(data)
	if err != nil {
		return Continue, ""
	}
	v, err := attributes(nested[unix.NFTA_DATA_VERDICT])
	if err != nil || v[unix.NFTA_VERDICT_CODE] == nil {
		return Continue, ""
	}
	target := text(v[unix.NFTA_VERDICT_CHAIN])
	switch int32(v.number(unix.NFTA_VERDICT_CODE)) {
	case int32(accept):
		return Accept, ""
	case unix.NFT_JUMP:
		return Jump, target
	case unix.NFT_GOTO:
		return Goto, target
	case unix.NFT_RETURN:
		return Return, ""
	case unix.NFT_CONTINUE, unix.NFT_BREAK:
		return Continue, ""
	}
	return Drop, "" // and NF_QUEUE
}
