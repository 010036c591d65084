// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"errors"
	"fmt"
	"strings"
)

// words are the remaining arguments of a line.
type words struct{ list []string }

// next consumes a word; there must be one.
func (w *words) next() string {
	word := w.list[0]
	w.list = w.list[1:]
	return word
}

// value consumes the value of an option.
func (w *words) value(option string) (string, error) {
	if len(w.list) == 0 {
		return "", fmt.Errorf("%s lacks its value", option)
	}
	return w.next(), nil
}

// split splits a line as iptables-restore does: at spaces, except between double quotes,
// where a backslash escapes the next character.
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

// plain are the characters of words that need no quotes.
const plain = "_-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

var escapes = strings.NewReplacer(`\`, `\\`, `"`, `\"`, `'`, `\'`)

// quote writes a word as iptables-save does.
func quote(s string) string {
	if s != "" && strings.Trim(s, plain) == "" {
		return s
	}
	return `"` + escapes.Replace(s) + `"`
}
