// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"regexp"
	"slices"
	"strings"
)

// redacted stands for a secret.
const redacted = "[redacted]"

const secretName = `(?:token|passw(?:or)?d|passphrase|secret|credential|private[_-]?key|client[_-]?key|access[_-]?key|api[_-]?key)[\w.-]*`

// What secrets look like. Text of others may have any: a comment of a rule, or what an API server answered, in the log.
var (
	privateKey = regexp.MustCompile(`(?s)-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\z)`)
	endOfKey   = regexp.MustCompile(`-----END [A-Z0-9 ]*PRIVATE KEY-----`)
	// A JSON web token, and a PEM block in base64 as in a kubeconfig.
	encoded = regexp.MustCompile(`\b(?:eyJ|LS0tLS1CRUdJTi)[\w+/=.-]{8,}`)
	// Authorization: Bearer ..., also in JSON, as a list, or if that is quoted again.
	authorization = regexp.MustCompile(`(?i)\b(bearer|authorization\\*["']?[ \t]*[:=][ \t]*\[?[ \t]*\\*["']?\w+)[ \t]+[\w.~+/=-]{4,}`)
	userOfURL     = regexp.MustCompile(`://[^/\s"'@]+@`)
	// A name that says that its value is secret, up to the value, or up to the value's quote as a group.
	named = regexp.MustCompile(`(?i)` + strings.Join([]string{
		// token=x, and "token": "x" in JSON, also if that is quoted again.
		secretName + `\\*["']?[ \t]*(?:=|["'][ \t]*:)[ \t]*`,
		// token: x after a separator. The word in a sentence, as in "failed to get a token: connection refused", is no key,
		// and neither is a service port as in shop/token:http.
		`(?:["']|(?:[{\[(\],;|&<>#]|\]:|\\[nrt])[ \t]*)[\w./-]*` + secretName + `:[ \t]+`,
		// --token x, "--token", "x" in JSON, and "--token" "x" in Go.
		`--[\w-]*` + secretName + `(?:[ \t]+|\\*["'][ \t]*,?[ \t]*(\\*["']))`,
		// {"name": "TOKEN", "value": "x"}
		secretName + `\\*["']?[ \t]*,[ \t]*\\*["']?value\\*["']?[ \t]*:[ \t]*`,
	}, "|"))
)

// Secrets of several lines, in YAML and indented JSON.
var (
	// What a container runtime writes before each line of a log.
	logPrefix = regexp.MustCompile(`^\S+ std(?:out|err) [FP] `)
	// Where the text of a line begins.
	indentation = regexp.MustCompile(`^[ \t]*(?:-[ \t]+)*`)
	// A key at the beginning of a line: the rest of it is secret, and so are the lines below that are indented more.
	ownKey = regexp.MustCompile(`(?i)^\\*["']?(?:[\w./-]*` + secretName + `\\*["']?[ \t]*:(?:[ \t]+|\s*$)|authorization\\*["']?[ \t]*:[ \t]*\[?\s*$)`)
	// --token in a list: its value is the next line.
	ownFlag = regexp.MustCompile(`(?i)^\\*["']?--[\w-]*` + secretName + `\\*["']?,?\s*$`)
	// name: TOKEN, and the key of the next line.
	ownName  = regexp.MustCompile(`(?i)^\\*["']?name\\*["']?[ \t]*:[ \t]*\\*["']?[\w.-]*` + secretName + `\\*["']?,?\s*$`)
	valueKey = regexp.MustCompile(`(?i)^\\*["']?value\\*["']?[ \t]*:[ \t]*`)
	// A key whose value is in the next lines, where tools have their lines joined: the indentation may be lost.
	joinedKey = regexp.MustCompile(`(?i);[ \t]*(?:-[ \t]+)*\\*["']?(?:[\w./-]*` + secretName + `|authorization)\\*["']?[ \t]*:[ \t]*(?:[|>][-+\d]*|\[)?;`)
)

// hints are parts of all of these in lower case. Expressions would take ten seconds for the rules of a large cluster.
var hints = [][]byte{
	[]byte("eyj"), []byte("ls0tls1crudjti"), []byte("bearer"), []byte("authorization"), []byte("://"),
	[]byte("token"), []byte("passw"), []byte("passphrase"), []byte("secret"), []byte("credential"), []byte("key"),
}

func mayHaveSecret(line []byte) bool {
	lower := bytes.ToLower(line)
	return slices.ContainsFunc(hints, func(hint []byte) bool { return bytes.Contains(lower, hint) })
}

// redact replaces secrets in a text. What only might be one is replaced, too.
func redact(text []byte) []byte {
	text = redactEnds(privateKey.ReplaceAll(text, []byte(redacted)))
	out := make([]byte, 0, len(text))
	var r lineRedactor
	for line := range bytes.Lines(text) {
		out = r.redact(out, line)
	}
	return out
}

// redactEnds replaces ends of private keys whose beginnings the text does not have.
func redactEnds(text []byte) (out []byte) {
	for {
		end := endOfKey.FindIndex(text)
		if end == nil {
			return append(out, text...)
		}
		out = append(append(out, text[:bodyOfKey(text[:end[0]])]...), redacted...)
		text = text[end[1]:]
	}
}

var (
	// What may be of a key: the end of the last line, where line breaks may be escaped or replaced, and whole lines before that.
	keyTail = regexp.MustCompile(`(?:^\S+ std(?:out|err) [FP] )?[\w+/=\\;, \t]*$`)
	keyLine = regexp.MustCompile(`^(?:\S+ std(?:out|err) [FP] )?[ \t]*[\w+/=]*\s*$`)
)

// bodyOfKey is where the body of a key begins that a text ends with.
func bodyOfKey(text []byte) int {
	at := bytes.LastIndexByte(text, '\n') + 1
	if tail := keyTail.FindIndex(text[at:])[0]; tail > 0 {
		return at + tail
	}
	for at > 0 {
		before := bytes.LastIndexByte(text[:at-1], '\n') + 1
		if !keyLine.Match(text[before:at]) {
			break
		}
		at = before
	}
	return at
}

// lineRedactor replaces secrets line by line. It knows what the lines before say about the next one.
type lineRedactor struct {
	block     bool // lines that are indented more than column are secret
	column    int
	afterFlag bool // the line is secret
	afterName bool // the line is secret if it is a value
}

func (r *lineRedactor) redact(out, line []byte) []byte {
	suspect := mayHaveSecret(line)
	if !suspect && *r == (lineRedactor{}) {
		return append(out, line...)
	}
	before := *r
	start := len(logPrefix.Find(line))
	indent := len(indentation.Find(line[start:]))
	body := line[start+indent:]
	// A list may be at the column of its key.
	column := indent - len(bytes.TrimLeft(line[start:start+indent], " \t"))
	isItem := column < indent
	switch {
	case len(bytes.TrimSpace(body)) == 0:
		return append(out, line...)
	case before.afterFlag, before.block && (column > before.column || column == before.column && isItem):
		r.afterFlag = false
		return appendRedacted(out, line, start+indent)
	}
	*r = lineRedactor{}
	key := ownKey.Find(body)
	if key == nil && before.afterName {
		key = valueKey.Find(body)
	}
	if key != nil {
		r.block, r.column = true, indent
		return appendRedacted(out, line, start+indent+len(key))
	}
	if !suspect {
		return append(out, line...)
	}
	r.afterFlag, r.afterName = ownFlag.Match(body), ownName.Match(body)
	if at := joinedKey.FindIndex(line); at != nil {
		return r.redact(out, appendRedacted(nil, line, at[1]-1)) // the rest of the line
	}
	parts := bytes.Split(redactLine(line), []byte("; "))
	if len(parts) == 1 {
		return append(out, parts[0]...)
	}
	// Messages of tools have their lines joined.
	var joined lineRedactor
	for i, part := range parts {
		if i > 0 {
			out = append(out, "; "...)
		}
		out = joined.redact(out, part)
	}
	return out
}

// appendRedacted appends a line of which all from an index on is secret.
func appendRedacted(out, line []byte, from int) []byte {
	secret := bytes.TrimRight(line[from:], "\r\n")
	if len(secret) == 0 {
		return append(out, line...)
	}
	return append(append(append(out, line[:from]...), redacted...), line[from+len(secret):]...)
}

func redactLine(line []byte) []byte {
	line = encoded.ReplaceAll(line, []byte(redacted))
	line = authorization.ReplaceAll(line, []byte("$1 "+redacted))
	line = userOfURL.ReplaceAll(line, []byte("://"+redacted+"@"))
	var out []byte
	for {
		at := named.FindSubmatchIndex(line)
		if at == nil {
			return append(out, line...)
		}
		value := at[1]
		if at[2] >= 0 {
			value = at[2]
		}
		out = append(out, line[:value]...)
		if n := valueLen(line[value:]); n > 0 {
			out = append(out, redacted...)
			value += n
		}
		line = line[value:]
	}
}

// valueLen is the length of the value that a text begins with.
func valueLen(text []byte) int {
	opening := len(text) - len(bytes.TrimLeft(text, `\`))
	switch {
	case len(bytes.TrimSpace(text)) == 0:
		return 0
	case text[0] == '[' || text[0] == '{':
		return listLen(text)
	case opening == len(text) || text[opening] != '"' && text[opening] != '\'':
		if end := bytes.IndexAny(text[1:], " \t\r\n\"',;&)}]"); end >= 0 {
			return 1 + end
		}
		return len(text)
	}
	// It ends with the same quote, before which there are as many backslashes; quotes in it have more.
	quote, backslashes := text[opening], 0
	for i := opening + 1; i < len(text); i++ {
		switch {
		case text[i] == '\\':
			backslashes++
			continue
		case text[i] == quote && backslashes == opening:
			return i + 1
		case text[i] == '\n':
			return i
		}
		backslashes = 0
	}
	return len(text)
}

// listLen is the length of the list or object that a text begins with.
func listLen(text []byte) int {
	depth := 0
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '[', '{':
			depth++
		case ']', '}':
			if depth--; depth == 0 {
				return i + 1
			}
		case '\\', '"', '\'':
			i += valueLen(text[i:]) - 1
		case '\n':
			return i
		}
	}
	return len(text)
}
