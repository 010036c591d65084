// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// outcome is the decision of a rule or a whole chain about a packet.
type outcome uint8

const (
	goOn outcome = iota // continue with the next rule
	returned
	accepted
	dropped
	rejected
)

const anyHook = prerouting | input | forward | output | postrouting

// newTarget returns the target with that name, or nil if it is the name of a chain.
func newTarget(name string, f proxier.Family) target {
	switch name {
	case "ACCEPT", "DROP", "RETURN":
		return verdict(name)
	case "REJECT":
		return &reject{kind: rejections[f][0], family: f}
	case "MARK":
		return &markTarget{}
	case "MASQUERADE":
		return &masquerade{}
	case "DNAT":
		return &dnat{family: f}
	case "REDIRECT":
		return &redirect{family: f}
	}
	return nil
}

// verdict is ACCEPT, DROP or RETURN.
type verdict string

func (v verdict) option(string, bool, *words) error { return errNotMine }
func (v verdict) finish(*rule) error                { return nil }
func (v verdict) String() string                    { return string(v) }
func (v verdict) table() string                     { return "" }
func (v verdict) hooks() hooks                      { return anyHook }

func (v verdict) act(*walk) outcome {
	switch v {
	case "ACCEPT":
		return accepted
	case "DROP":
		return dropped
	}
	return returned
}

// tcpReset rejects TCP as if no socket listened.
const tcpReset = "tcp-reset"

// rejections are the possible values of --reject-with; the first one is the default.
var rejections = [proxier.Families][]string{
	{
		"icmp-port-unreachable", "icmp-net-unreachable", "icmp-host-unreachable", "icmp-proto-unreachable",
		"icmp-net-prohibited", "icmp-host-prohibited", "icmp-admin-prohibited", tcpReset,
	},
	{
		"icmp6-port-unreachable", "icmp6-no-route", "icmp6-adm-prohibited", "icmp6-addr-unreachable",
		"icmp6-policy-fail", "icmp6-reject-route", tcpReset,
	},
}

// reject rejects the packet with an ICMP error or a reset.
type reject struct {
	kind   string
	family proxier.Family
}

func (t *reject) option(name string, not bool, w *words) (err error) {
	if name != "--reject-with" {
		return errNotMine
	}
	if t.kind, err = w.value(name); err == nil && !slices.Contains(rejections[t.family], t.kind) {
		err = fmt.Errorf("unknown answer %q", t.kind)
	}
	return errors.Join(noNot(not), err)
}

func (t *reject) finish(r *rule) error {
	if t.kind == tcpReset && !r.protocol.exactly(proxier.TCP) {
		return errors.New("tcp-reset without -p tcp")
	}
	return nil
}

func (t *reject) String() string { return "REJECT --reject-with " + t.kind }
func (t *reject) table() string  { return "filter" }
func (t *reject) hooks() hooks   { return input | forward | output }

func (t *reject) act(w *walk) outcome {
	w.result.Kind = t.kind
	return rejected
}

// markTarget changes the packet's mark: the bits of mask are cleared, then those of
// value inverted.
type markTarget struct {
	value, mask uint32
	given       bool
}

func (t *markTarget) option(name string, not bool, w *words) error {
	if name != "--set-xmark" && name != "--or-mark" && name != "--xor-mark" {
		return errNotMine
	}
	if t.given {
		return errors.New("MARK with two options")
	}
	t.given = true
	text, err := w.value(name)
	if err != nil {
		return err
	}
	value, mask, err := parseMark(text)
	switch name {
	case "--or-mark":
		mask = value
	case "--xor-mark":
		mask = 0
	}
	t.value, t.mask = value, mask
	return errors.Join(noNot(not), err)
}

func (t *markTarget) finish(*rule) error {
	if !t.given {
		return errors.New("MARK without --set-xmark")
	}
	return nil
}

func (t *markTarget) String() string { return fmt.Sprintf("MARK --set-xmark %#x/%#x", t.value, t.mask) }
func (t *markTarget) table() string  { return "" }
func (t *markTarget) hooks() hooks   { return anyHook }

func (t *markTarget) act(w *walk) outcome {
	w.mark = w.mark&^t.mask ^ t.value
	return goOn
}

// masquerade replaces the source by the node's address.
type masquerade struct{ randomFully bool }

func (t *masquerade) option(name string, not bool, _ *words) error {
	if name != "--random-fully" {
		return errNotMine
	}
	t.randomFully = true
	return noNot(not)
}

func (t *masquerade) finish(*rule) error { return nil }
func (t *masquerade) table() string      { return "nat" }
func (t *masquerade) hooks() hooks       { return postrouting }

func (t *masquerade) String() string {
	if t.randomFully {
		return "MASQUERADE --random-fully"
	}
	return "MASQUERADE"
}

func (t *masquerade) act(w *walk) outcome {
	w.result.Masqueraded = true
	return accepted
}

// dnat changes the destination to an address, and optionally a port.
type dnat struct {
	addr   netip.Addr
	port   uint16
	family proxier.Family
}

func (t *dnat) option(name string, not bool, w *words) error {
	if name != "--to-destination" {
		return errNotMine
	}
	value, err := w.value(name)
	if err != nil {
		return err
	}
	if to, err := netip.ParseAddrPort(value); err == nil && to.Port() != 0 {
		t.addr, t.port = to.Addr(), to.Port()
	} else if t.addr, err = netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(value, "["), "]")); err != nil {
		return fmt.Errorf("destination %q", value)
	}
	if proxier.FamilyOf(t.addr) != t.family || t.addr.Zone() != "" {
		return fmt.Errorf("destination %q", value)
	}
	return noNot(not)
}

func (t *dnat) finish(r *rule) error {
	switch {
	case !t.addr.IsValid():
		return errors.New("DNAT without --to-destination")
	case t.port != 0 && !r.protocol.ports():
		return errors.New("a port without a protocol that has ports")
	}
	return nil
}

func (t *dnat) String() string {
	text := addrText(wordsOf(t.addr), t.family)
	if t.port != 0 && t.family == proxier.IPv6 {
		text = "[" + text + "]"
	}
	if t.port != 0 {
		text += fmt.Sprintf(":%d", t.port)
	}
	return "DNAT --to-destination " + text
}

func (t *dnat) table() string { return "nat" }
func (t *dnat) hooks() hooks  { return prerouting | output }

func (t *dnat) act(w *walk) outcome {
	w.translate(t.addr, t.port)
	return accepted
}

// redirect changes the destination to this node itself.
type redirect struct {
	port   uint16
	family proxier.Family
}

func (t *redirect) option(name string, not bool, w *words) error {
	if name != "--to-ports" {
		return errNotMine
	}
	value, err := w.value(name)
	if err != nil {
		return err
	}
	port, err := strconv.ParseUint(value, 10, 16)
	if err != nil || port == 0 || port > math.MaxUint16 {
		return fmt.Errorf("port %q", value)
	}
	t.port = uint16(port)
	return noNot(not)
}

func (t *redirect) finish(r *rule) error {
	if t.port != 0 && !r.protocol.ports() {
		return errors.New("a port without a protocol that has ports")
	}
	return nil
}

func (t *redirect) String() string {
	if t.port == 0 {
		return "REDIRECT"
	}
	return fmt.Sprintf("REDIRECT --to-ports %d", t.port)
}

func (t *redirect) table() string { return "nat" }
func (t *redirect) hooks() hooks  { return prerouting | output }

func (t *redirect) act(w *walk) outcome {
	to := w.packet.Own
	switch {
	case w.in != "":
	case t.family == proxier.IPv4:
		to = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	default:
		to = netip.IPv6Loopback()
	}
	w.translate(to, t.port)
	w.redirected = true
	return accepted
}
