// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// icmp matches the type of an ICMP message.
type icmp struct {
	name, flag string
	protocol   proxier.Protocol
	echo       uint8 // echo-request
	kind, code int
	not        bool
}

func (m *icmp) option(name string, not bool, w *words) error {
	if name != m.flag {
		return errNotMine
	}
	value, err := w.value(name)
	if err != nil {
		return err
	}
	m.not, m.code = not, unset
	if value == "echo-request" {
		m.kind = int(m.echo)
		return nil
	}
	kind, code, both := strings.Cut(value, "/")
	n, err := strconv.ParseUint(kind, 10, 8)
	m.kind = int(n)
	if err == nil && both {
		n, err = strconv.ParseUint(code, 10, 8)
		m.code = int(n)
	}
	if err != nil {
		return fmt.Errorf("type %q", value)
	}
	return nil
}

func (m *icmp) finish(r *rule) error {
	switch {
	case !r.protocol.exactly(m.protocol):
		return fmt.Errorf("-m %s without its protocol", m.name)
	case m.kind == unset:
		return fmt.Errorf("-m %s without %s", m.name, m.flag)
	}
	return nil
}

func (m *icmp) matches(w *walk) bool {
	// All messages that can be traced have code 0.
	return (int(w.packet.ICMPType) == m.kind && m.code <= 0) != m.not
}

func (m *icmp) String() string {
	text := fmt.Sprintf("-m %s %s%s %d", m.name, negated(m.not), m.flag, m.kind)
	if m.code != unset {
		text += fmt.Sprintf("/%d", m.code)
	}
	return text
}
