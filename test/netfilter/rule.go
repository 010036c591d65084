// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// rule is a parsed rule with its text in iptables-save.
//
// Addresses, devices and the protocol are fields instead of matches, as in the kernel, for
// speed: in long chains, nearly all rules differ in these.
type rule struct {
	text     string // without "-A CHAIN "
	src, dst addresses
	in, out  device
	protocol protocol
	matches  []match
	target   target // nil for none and for jumps
	jump     string // the chain
}

// part is a match or a target that is being read: -m name or -j name, and the
// options that follow.
type part interface {
	// option parses an option of this part; it returns errNotMine for others.
	option(name string, not bool, w *words) error
	// finish is called after the whole rule is parsed.
	finish(r *rule) error
	// String returns the part as saved.
	String() string
}

// match is a condition.
type match interface {
	part
	matches(*walk) bool
}

// target is the action for matching packets.
type target interface {
	part
	// table is the only table for the target; empty for any.
	table() string
	// hooks are the hooks from which the target may be reached.
	hooks() hooks
	act(*walk) outcome
}

// errNotMine says that an option belongs to another part.
var errNotMine = errors.New("not an option of this part")

func (r *rule) matchesPacket(w *walk) bool {
	if !r.dst.contain(w.dst) || !r.src.contain(w.src) || !r.protocol.is(w.packet.Protocol) || !r.in.is(w.in) || !r.out.is(w.out) {
		return false
	}
	for _, m := range r.matches {
		if !m.matches(w) {
			return false
		}
	}
	return true
}

// parser reads a rule.
type parser struct {
	family proxier.Family
	rule   *rule
	parts  []part // in the order of the rule
	names  []string
	seen   []string // options that may not be repeated
}

// parseRule parses a rule after the name of the chain.
func parseRule(f proxier.Family, w *words) (*rule, error) {
	p := &parser{family: f, rule: &rule{}}
	for len(w.list) > 0 {
		name := w.next()
		not := name == "!"
		if not {
			if len(w.list) == 0 {
				return nil, errors.New("the rule ends with a ! without an option")
			}
			name = w.next()
		}
		if err := p.option(name, not, w); err != nil {
			return nil, err
		}
	}
	return p.rule, p.finish()
}

// once rejects repeated options.
func (p *parser) once(option string) error {
	if slices.Contains(p.seen, option) {
		return fmt.Errorf("%s is repeated", option)
	}
	p.seen = append(p.seen, option)
	return nil
}

func (p *parser) option(name string, not bool, w *words) error {
	switch name {
	case "-m":
	case "-s", "-d", "-i", "-o", "-p", "-j":
		if err := p.once(name); err != nil {
			return err
		}
	default:
		return p.ofParts(name, not, w)
	}
	value, err := w.value(name)
	if err != nil {
		return err
	}
	r := p.rule
	switch name {
	case "-s":
		r.src, err = parseAddresses(p.family, value, not)
	case "-d":
		r.dst, err = parseAddresses(p.family, value, not)
	case "-i":
		r.in, err = parseDevice(value, not)
	case "-o":
		r.out, err = parseDevice(value, not)
	case "-p":
		r.protocol, err = parseProtocol(value, not)
	case "-m":
		err = errors.Join(noNot(not), p.load(value))
	case "-j":
		err = noNot(not)
		if r.target = newTarget(value, p.family); r.target == nil {
			r.jump = value
		} else {
			p.parts, p.names = append(p.parts, r.target), append(p.names, value)
		}
	}
	return err
}

// noNot rejects a ! before an option that cannot be negated.
func noNot(not bool) error {
	if not {
		return errors.New("unexpected ! before this option")
	}
	return nil
}

func (p *parser) load(name string) error {
	m := newMatch(name, p.family)
	if m == nil {
		return fmt.Errorf("unknown match %q", name)
	}
	p.parts, p.names = append(p.parts, m), append(p.names, name)
	return nil
}

// ofParts passes an option to its target or match. An option of the protocol's match loads
// that match.
func (p *parser) ofParts(name string, not bool, w *words) error {
	for i, part := range slices.Backward(p.parts) {
		err := part.option(name, not, w)
		if errors.Is(err, errNotMine) {
			continue
		}
		return errors.Join(err, p.once(fmt.Sprintf("%s of part %d", name, i)))
	}
	if implied := p.rule.protocol.match(); implied != "" && !slices.Contains(p.names, implied) {
		return errors.Join(p.load(implied), p.ofParts(name, not, w))
	}
	return fmt.Errorf("unknown option %q", name)
}

// finish validates the parts and writes the text: addresses, devices and the protocol, then
// the matches in the order of the rule, then the target.
func (p *parser) finish() error {
	r := p.rule
	text := []string{
		r.src.option("-s", p.family), r.dst.option("-d", p.family), r.in.option("-i"), r.out.option("-o"), r.protocol.String(),
	}
	for _, part := range p.parts {
		if err := part.finish(r); err != nil {
			return err
		}
		m, ok := part.(match)
		if !ok {
			continue
		}
		text = append(text, m.String())
		if _, says := m.(*comment); !says {
			r.matches = append(r.matches, m)
		}
	}
	if r.target != nil {
		text = append(text, "-j "+r.target.String())
	} else if r.jump != "" {
		text = append(text, "-j "+r.jump)
	}
	r.text = strings.Join(slices.DeleteFunc(text, func(s string) bool { return s == "" }), " ")
	return nil
}
