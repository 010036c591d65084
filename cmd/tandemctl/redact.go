// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"regexp"
	"slices"
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
	// Authorization: Bearer ...
	authorization = regexp.MustCompile(`(?i)\b(bearer|authorization:\s*\w+)\s+[\w.~+/=-]{4,}`)
	userOfURL     = regexp.MustCompile(`://[^/\s"'@]+@`)
	// A name that says that its value is secret, up to the value: token=x, "token": "x" in JSON, also if that is quoted again,
	// token: x in YAML, --token x. A service port as in shop/token:http is none.
	named = regexp.MustCompile(`(?i)` + secretName + `(?:\\*["']?\s*=\s*|\\*["']\s*:\s*|:\s+)|--[\w-]*` + secretName + `\s+`)
)

// hints are parts of all of these in lower case. Expressions would take ten seconds for the rules of a large cluster.
var hints = [][]byte{
	[]byte("eyj"), []byte("ls0tls1crudjti"), []byte("bearer"), []byte("authorization:"), []byte("://"),
	[]byte("token"), []byte("passw"), []byte("passphrase"), []byte("secret"), []byte("credential"), []byte("key"),
}

func mayHaveSecret(line []byte) bool {
	lower := bytes.ToLower(line)
	return slices.ContainsFunc(hints, func(hint []byte) bool { return bytes.Contains(lower, hint) })
}

// redact replaces secrets in a text. What only might be one is replaced, too.
func redact(text []byte) []byte {
	text = privateKey.ReplaceAll(text, []byte(redacted))
	if ends := endOfKey.FindAllIndex(text, -1); ends != nil { // the text begins within a key
		text = append([]byte(redacted), text[ends[len(ends)-1][1]:]...)
	}
	out := make([]byte, 0, len(text))
	for line := range bytes.Lines(text) {
		if mayHaveSecret(line) {
			line = redactLine(line)
		}
		out = append(out, line...)
	}
	return out
}

func redactLine(line []byte) []byte {
	line = encoded.ReplaceAll(line, []byte(redacted))
	line = authorization.ReplaceAll(line, []byte("$1 "+redacted))
	line = userOfURL.ReplaceAll(line, []byte("://"+redacted+"@"))
	var out []byte
	for {
		at := named.FindIndex(line)
		if at == nil {
			return append(out, line...)
		}
		out = append(append(out, line[:at[1]]...), redacted...)
		line = line[at[1]+valueLen(line[at[1]:]):]
	}
}

// valueLen is the length of the value that a text begins with.
func valueLen(text []byte) int {
	opening := len(text) - len(bytes.TrimLeft(text, `\`))
	if opening == len(text) || text[opening] != '"' && text[opening] != '\'' {
		if end := bytes.IndexAny(text, " \t\r\n\"',;&)}]"); end >= 0 {
			return end
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
