// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"sigs.k8s.io/yaml"
)

// maxDocument is the maximum size of an object, or of a list that cannot be split before it is
// parsed: parsed YAML takes about fifty times the memory of its text. The API server accepts
// 3 MiB, and the largest EndpointSlice has a tenth of that.
const maxDocument = 4 << 20

// document is the text of one object, or of one list.
type document struct {
	line int // of the file, from 1
	text []byte
	json bool
	// list is the type of the list that contains it. Items of typed lists may omit their
	// own type.
	list typeMeta
	err  error // it cannot be separated from the file; text is empty then
}

type typeMeta struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
}

func (t typeMeta) isList() bool { return strings.HasSuffix(t.Kind, "List") }

// item returns the type of items without a type of their own.
func (t typeMeta) item() typeMeta {
	if t.Kind == "List" {
		return typeMeta{}
	}
	return typeMeta{APIVersion: t.APIVersion, Kind: strings.TrimSuffix(t.Kind, "List")}
}

// split splits a file into documents. They alias data, which the caller must own: split
// overwrites the dash at the beginning of list items.
func split(name string, data []byte) []document {
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))
	if strings.HasSuffix(strings.ToLower(name), ".json") {
		return splitJSON(data, 1)
	}
	var docs []document
	add := func(line int, text []byte) {
		if !hasContent(text) {
			return
		}
		if trimmed := bytes.TrimSpace(afterMarker(text)); len(trimmed) > 0 && trimmed[0] == '{' {
			offset := bytes.IndexByte(text, '{')
			inner := splitJSON(text[offset:], line+bytes.Count(text[:offset], []byte{'\n'}))
			// A flow mapping of YAML can begin like JSON.
			if len(inner) == 0 || inner[len(inner)-1].err == nil {
				docs = append(docs, inner...)
				return
			}
		}
		if items, ok := splitYAMLList(text, line); ok {
			docs = append(docs, items...)
			return
		}
		docs = append(docs, document{line: line, text: text})
	}

	start, startLine := 0, 1
	for at, line := 0, 1; at < len(data); line++ {
		end := lineEnd(data, at)
		switch {
		case isMarker(data[at:end], "---"):
			add(startLine, data[start:at])
			start, startLine = at, line
		case isMarker(data[at:end], "..."):
			add(startLine, data[start:at])
			start, startLine = end, line+1
		}
		at = end
	}
	add(startLine, data[start:])
	return docs
}

// lineEnd returns the offset after the line that begins at an offset.
func lineEnd(data []byte, at int) int {
	if i := bytes.IndexByte(data[at:], '\n'); i >= 0 {
		return at + i + 1
	}
	return len(data)
}

// isMarker reports whether a line is a document marker.
func isMarker(line []byte, marker string) bool {
	return bytes.HasPrefix(line, []byte(marker)) && (len(line) == 3 || bytes.IndexByte([]byte(" \t\r\n"), line[3]) >= 0)
}

func afterMarker(text []byte) []byte {
	if isMarker(text, "---") {
		return text[3:]
	}
	return text
}

// hasContent reports whether there is anything but comments and directives.
func hasContent(text []byte) bool {
	text = afterMarker(text)
	for at := 0; at < len(text); {
		end := lineEnd(text, at)
		if line := bytes.TrimSpace(text[at:end]); len(line) > 0 && line[0] != '#' && line[0] != '%' {
			return true
		}
		at = end
	}
	return false
}

// splitYAMLList splits a list in block style, as kubectl prints it, into its items. Each item is
// then parsed separately, which limits the memory, gives every item a line number, and limits
// errors to one item. The disadvantage is that an alias cannot refer to another item.
func splitYAMLList(text []byte, line int) ([]document, bool) {
	var head []byte
	var items []document
	var dashes []int
	indent, itemStart, inItems := -1, -1, false
	end := 0
	finish := func(at int) {
		if itemStart >= 0 {
			items[len(items)-1].text = text[itemStart:at]
			itemStart = -1
		}
	}
	for at := 0; at < len(text); at, line = end, line+1 {
		end = lineEnd(text, at)
		content := bytes.TrimLeft(text[at:end], " ")
		column := end - at - len(content)
		blank := len(bytes.TrimSpace(content)) == 0 || content[0] == '#'
		isDash := content != nil && bytes.HasPrefix(content, []byte("-")) && !isMarker(content, "---") &&
			(len(content) == 1 || bytes.IndexByte([]byte(" \r\n"), content[1]) >= 0)
		switch {
		case blank:
			if !inItems {
				head = append(head, text[at:end]...)
			}
		case !inItems && column == 0 && bytes.Equal(bytes.TrimSpace(content), []byte("items:")):
			if indent >= 0 {
				return nil, false // twice
			}
			inItems = true
		case inItems && isDash && (indent < 0 || column == indent):
			finish(at)
			indent, itemStart = column, at
			items = append(items, document{line: line})
			dashes = append(dashes, at+column)
		case inItems && indent >= 0 && column > indent:
			// the item goes on
		case inItems && column == 0 && indent >= 0:
			finish(at)
			inItems = false
			head = append(head, text[at:end]...)
		case inItems:
			return nil, false
		default:
			head = append(head, text[at:end]...)
		}
	}
	finish(len(text))
	if len(items) == 0 || len(head) > maxDocument {
		return nil, false
	}
	var list typeMeta
	if err := yaml.Unmarshal(head, &list); err != nil || !list.isList() {
		return nil, false
	}
	for i := range items {
		items[i].list = list
		text[dashes[i]] = ' '
	}
	return items, true
}

// splitJSON splits a stream of JSON values, and the lists in it.
func splitJSON(data []byte, line int) []document {
	var docs []document
	decoder := json.NewDecoder(bytes.NewReader(data))
	lines := lineCounter{data: data, line: line}
	for {
		var raw json.RawMessage
		start := skipSpace(data, int(decoder.InputOffset()))
		err := decoder.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return docs
		}
		if err != nil {
			at := int(decoder.InputOffset())
			if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
				at = max(at, int(syntax.Offset)-1)
			}
			return append(docs, document{line: lines.at(min(max(at, start), len(data))), json: true, err: fmt.Errorf("not valid JSON: %w", err)})
		}
		text := data[start:decoder.InputOffset()]
		first := lines.at(start)
		if items, ok := splitJSONList(text, first); ok {
			docs = append(docs, items...)
		} else {
			docs = append(docs, document{line: first, text: text, json: true})
		}
	}
}

// splitJSONList splits a list, which must be valid JSON, into its items.
func splitJSONList(text []byte, line int) ([]document, bool) {
	// Searching for the word first avoids a second scan of objects that are no lists.
	if !bytes.Contains(text, []byte(`"items"`)) {
		return nil, false
	}
	var list typeMeta
	if err := json.Unmarshal(text, &list); err != nil || !list.isList() {
		return nil, false
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	if _, err := decoder.Token(); err != nil {
		return nil, false
	}
	var items []document
	lines := lineCounter{data: text, line: line}
	for decoder.More() {
		name, err := decoder.Token()
		if err != nil {
			return nil, false
		}
		var raw json.RawMessage
		if name != "items" {
			if err := decoder.Decode(&raw); err != nil {
				return nil, false
			}
			continue
		}
		if token, err := decoder.Token(); err != nil || token != json.Delim('[') {
			return nil, false
		}
		for decoder.More() {
			start := skipSpace(text, int(decoder.InputOffset()))
			if err := decoder.Decode(&raw); err != nil {
				return nil, false
			}
			items = append(items, document{
				line: lines.at(start), text: text[start:decoder.InputOffset()], json: true, list: list,
			})
		}
		if _, err := decoder.Token(); err != nil {
			return nil, false
		}
	}
	return items, true
}

// skipSpace returns the offset of the next value: a decoder's offset is before white space and
// commas.
func skipSpace(data []byte, at int) int {
	for at < len(data) && bytes.IndexByte([]byte(" \t\r\n,"), data[at]) >= 0 {
		at++
	}
	return at
}

// lineCounter returns the lines of ascending offsets in one scan.
type lineCounter struct {
	data   []byte
	offset int
	line   int
}

func (c *lineCounter) at(offset int) int {
	c.line += bytes.Count(c.data[c.offset:offset], []byte{'\n'})
	c.offset = offset
	return c.line
}
