// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"errors"
	"fmt"
	"strings"
)

// words are the arguments of a line that are not yet read.
type words struct{ list []string }

// next takes a word; there has to be one.
func (w *words) next() string {
	word := w.list[0]
	w.list = w.list[1:]
	return word
}

// value takes the value of an option.
func (w *words) value(option string) (string, error) {
	if len(w.list) == 0 {
		return "", fmt.Errorf("%s lacks its value", option)
	}
	return w.next(), nil
}

// split takes a line apart as iptables-restore does: at spaces, except between double
// quotes, where a backslash takes the next character as it is.
func split(line string) ([]string, error) {
	var list []string
	var word strings.Builder
	quoted, escaped, begun := false, false, false
	end := func() {
		if begun {
			list = append(list, word.String())
		}
		word.Reset()
		begun = false
	}
	for _, c := range []byte(line) {
		switch {
		case escaped:
			word.WriteByte(c)
			escaped = false
		case quoted && c == '\\':
			escaped = true
		case quoted && c == '"':
			quoted = false
			end()
		case quoted:
			word.WriteByte(c)
		case c == '"':
			quoted, begun = true, true
		case c == ' ', c == '\t':
			end()
		default:
			word.WriteByte(c)
			begun = true
		}
	}
	if quoted {
		return nil, errors.New("a quote is not closed")
	}
	end()
	return list, nil
}

// plain are the characters of which a word may consist without being quoted.
const plain = "_-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

var escapes = strings.NewReplacer(`\`, `\\`, `"`, `\"`, `'`, `\'`)

// quote writes a word as iptables-save does.
func quote(s string) string {
	if s != "" && strings.Trim(s, plain) == "" {
		return s
	}
	return `"` + escapes.Replace(s) + `"`
}
