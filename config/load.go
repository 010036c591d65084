// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	yamlv3 "go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"
	kubeproxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// Load reads a configuration file and fills in defaults. Warnings name what was
// ignored: fields that this build does not know, so that a file written for a newer
// one still works, and foreign documents after the first, which upstream does not read
// either. The error has everything else that does not decode; the configuration has
// the rest then, whose values can be validated as well.
func Load(path string) (c *Config, warnings []string, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, fmt.Errorf("read configuration: %w", err)
	}
	return parse(path, data)
}

func parse(path string, data []byte) (*Config, []string, error) {
	f := &file{path: path, config: &Config{origin: map[string]string{}}}
	decoder := yamlv3.NewDecoder(bytes.NewReader(data))
	for {
		var document yamlv3.Node
		err := decoder.Decode(&document)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			// Nothing after a syntax error can be read.
			line, text := 0, strings.TrimPrefix(err.Error(), "yaml: ")
			if n, _ := fmt.Sscanf(text, "line %d:", &line); n == 1 {
				_, text, _ = strings.Cut(text, ": ")
			}
			f.fail(line, "%s", text)
			break
		}
		if len(document.Content) == 1 && document.Content[0].Tag != "!!null" {
			f.decode(document.Content[0])
			f.documents++
		}
	}
	if f.seen[KubeProxyKind] == 0 && f.seen[TandemKind] == 0 && len(f.errs) == 0 {
		f.fail(0, "found no %s", KubeProxyKind)
	}
	f.config.SetDefaults()
	return f.config, f.warned(), errors.Join(f.errs...)
}

// file is a configuration file while it is read.
type file struct {
	path      string
	config    *Config
	documents int            // so far
	seen      map[string]int // line of the document, by kind
	warnings  []warning
	errs      []error
}

type warning struct {
	line int
	text string
}

func (f *file) at(line int, format string, args ...any) string {
	text := f.path
	if line > 0 {
		text = fmt.Sprintf("%s:%d", f.path, line)
	}
	return text + ": " + fmt.Sprintf(format, args...)
}

func (f *file) warn(line int, format string, args ...any) {
	f.warnings = append(f.warnings, warning{line, f.at(line, format, args...)})
}

// warned is the warnings in the order of their lines.
func (f *file) warned() (texts []string) {
	slices.SortStableFunc(f.warnings, func(a, b warning) int { return a.line - b.line })
	for _, w := range f.warnings {
		texts = append(texts, w.text)
	}
	return texts
}

func (f *file) fail(line int, format string, args ...any) {
	f.errs = append(f.errs, errors.New(f.at(line, format, args...)))
}

func (f *file) decode(root *yamlv3.Node) {
	apiVersion, kind := scalar(root, "apiVersion"), scalar(root, "kind")
	var target func() any // emptied
	var fresh func() any
	var prefix *field.Path
	switch {
	case apiVersion == KubeProxyAPIVersion && kind == KubeProxyKind:
		target = func() any {
			f.config.KubeProxy = kubeproxyv1alpha1.KubeProxyConfiguration{}
			return &f.config.KubeProxy
		}
		fresh = func() any { return &new(Config).KubeProxy }
	case apiVersion == TandemAPIVersion && kind == TandemKind:
		target = func() any { f.config.Tandem = TandemConfiguration{}; return &f.config.Tandem }
		fresh = func() any { return &new(Config).Tandem }
		prefix = field.NewPath(TandemKind)
	case root.Kind != yamlv3.MappingNode:
		f.foreign(root, "a document must be a mapping with apiVersion and kind")
		return
	default:
		f.foreign(root, "apiVersion %q, kind %q: want %s, kind %s, or %s, kind %s",
			apiVersion, kind, KubeProxyAPIVersion, KubeProxyKind, TandemAPIVersion, TandemKind)
		return
	}
	if line, again := f.seen[kind]; again {
		if kind == KubeProxyKind { // upstream reads the first, and no further
			f.warn(root.Line, "ignoring a second %s; the first is in line %d", kind, line)
			return
		}
		f.fail(root.Line, "found a second %s; the first is in line %d", kind, line)
		return
	}
	if f.seen == nil {
		f.seen = map[string]int{}
	}
	if kind == KubeProxyKind && f.seen[TandemKind] != 0 {
		f.warn(root.Line, "%s is not the first document, so upstream's proxy would not read it", KubeProxyKind)
	}
	f.seen[kind] = root.Line

	unknown, err := unmarshal(root, target())
	if err != nil {
		bad := f.diagnose(root, fresh, kind, err)
		// Decode the rest as well; if that fails, there is an error already.
		if unknown, err = unmarshal(without(root, bad), target()); err != nil {
			target()
		}
	}
	for _, err := range unknown {
		f.warn(lineOfStrict(root, err), "%s: %v", kind, err)
	}
	walk(root, prefix, func(at *field.Path, n *yamlv3.Node) {
		f.config.origin[at.String()] = fmt.Sprintf("%s:%d", f.path, n.Line)
	})
}

// foreign is for a document of another kind. After the first, where upstream does not
// look, it is ignored, unless it looks like a misspelt document of this proxy.
func (f *file) foreign(root *yamlv3.Node, format string, args ...any) {
	group, _, _ := strings.Cut(TandemAPIVersion, "/")
	if f.documents == 0 || scalar(root, "kind") == TandemKind || strings.HasPrefix(scalar(root, "apiVersion"), group) {
		f.fail(root.Line, format, args...)
		return
	}
	f.warn(root.Line, "ignoring a document: "+format, args...)
}

// unmarshal decodes as the API machinery does: names are matched exactly, and
// what a strict decoder objects to is told apart from what no decoder can use.
func unmarshal(root *yamlv3.Node, target any) (strict []error, err error) {
	text, err := yamlv3.Marshal(root)
	if err != nil {
		return nil, err
	}
	data, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		// A duplicate key; the last one is used.
		data, err = yaml.YAMLToJSON(text)
		if err != nil {
			return nil, err
		}
		strict = append(strict, duplicates(root)...)
	}
	unknown, err := kjson.UnmarshalStrict(data, target)
	for _, e := range unknown {
		strict = append(strict, fmt.Errorf("%w (ignored)", e))
	}
	return strict, err
}

// strictError is about one field.
type strictError struct {
	line int
	text string
}

func (e *strictError) Error() string { return e.text }

func duplicates(root *yamlv3.Node) (errs []error) {
	var visit func(at *field.Path, n *yamlv3.Node)
	visit = func(at *field.Path, n *yamlv3.Node) {
		if n.Kind != yamlv3.MappingNode {
			return
		}
		seen := map[string]bool{}
		for i := 0; i+1 < len(n.Content); i += 2 {
			name := n.Content[i].Value
			if seen[name] {
				errs = append(errs, &strictError{n.Content[i].Line, fmt.Sprintf("duplicate field %q; the last one is used", at.Child(name))})
			}
			seen[name] = true
			visit(at.Child(name), n.Content[i+1])
		}
	}
	visit(nil, root)
	return errs
}

// diagnose finds out which fields do not decode: the decoder stops at the
// first, and does not always name it. Each is tried alone.
func (f *file) diagnose(root *yamlv3.Node, fresh func() any, kind string, err error) (bad map[*yamlv3.Node]bool) {
	bad = map[*yamlv3.Node]bool{}
	var try func(at *field.Path, name, n *yamlv3.Node, nest func(*yamlv3.Node) *yamlv3.Node)
	try = func(at *field.Path, name, n *yamlv3.Node, nest func(*yamlv3.Node) *yamlv3.Node) {
		// The document with nothing in it but the path to this field.
		here := func(value *yamlv3.Node) *yamlv3.Node {
			return nest(&yamlv3.Node{Kind: yamlv3.MappingNode, Tag: "!!map", Content: []*yamlv3.Node{name, value}})
		}
		alone := n
		if n.Kind == yamlv3.MappingNode {
			alone = &yamlv3.Node{Kind: n.Kind, Tag: n.Tag, Style: n.Style}
		}
		if _, err := unmarshal(here(alone), fresh()); err != nil {
			bad[n] = true
			f.fail(n.Line, "%s.%s: %s", kind, at, plain(err))
			return
		}
		eachField(n, at, func(at *field.Path, name, n *yamlv3.Node) { try(at, name, n, here) })
	}
	eachField(root, nil, func(at *field.Path, name, n *yamlv3.Node) {
		try(at, name, n, func(n *yamlv3.Node) *yamlv3.Node { return n })
	})
	if len(bad) == 0 {
		f.fail(root.Line, "%s: %s", kind, plain(err))
	}
	return bad
}

// without is a copy of a mapping that lacks some of the fields in it.
func without(n *yamlv3.Node, bad map[*yamlv3.Node]bool) *yamlv3.Node {
	if n.Kind != yamlv3.MappingNode {
		return n
	}
	rest := *n
	rest.Content = nil
	for i := 0; i+1 < len(n.Content); i += 2 {
		if !bad[n.Content[i+1]] {
			rest.Content = append(rest.Content, n.Content[i], without(n.Content[i+1], bad))
		}
	}
	return &rest
}

// plain takes the Go out of an error of the JSON decoder.
func plain(err error) string {
	text := strings.TrimPrefix(err.Error(), "json: ")
	rest, ok := strings.CutPrefix(text, "cannot unmarshal ")
	if !ok {
		return text
	}
	value, rest, _ := strings.Cut(rest, " into Go ")
	value = strings.NewReplacer("array", "list", "object", "mapping", "bool", "boolean").Replace(value)
	_, goType, _ := strings.Cut(rest, "of type ")
	want := ""
	switch goType {
	case "bool":
		want = "true or false"
	case "string":
		want = "a string"
	case "int32":
		want = "a whole number"
	case "uint32":
		want = "a whole number of 0 or more"
	case "float32":
		want = "a number"
	default:
		return "a " + value + " is not allowed here"
	}
	return "got " + value + ", want " + want
}

// eachField visits the fields of a mapping.
func eachField(n *yamlv3.Node, at *field.Path, visit func(at *field.Path, name, n *yamlv3.Node)) {
	if n.Kind != yamlv3.MappingNode {
		return
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		visit(at.Child(n.Content[i].Value), n.Content[i], n.Content[i+1])
	}
}

// walk visits everything below a mapping.
func walk(n *yamlv3.Node, at *field.Path, visit func(*field.Path, *yamlv3.Node)) {
	below := func(at *field.Path, n *yamlv3.Node) {
		visit(at, n)
		walk(n, at, visit)
	}
	eachField(n, at, func(at *field.Path, _, n *yamlv3.Node) { below(at, n) })
	if n.Kind == yamlv3.SequenceNode && at != nil {
		for i, item := range n.Content {
			below(at.Index(i), item)
		}
	}
}

// lineOfStrict finds the field that a strict decoding error names in quotes.
func lineOfStrict(root *yamlv3.Node, err error) int {
	var strict *strictError
	if errors.As(err, &strict) {
		return strict.line
	}
	_, rest, _ := strings.Cut(err.Error(), `"`)
	name, _, _ := strings.Cut(rest, `"`)
	line := root.Line
	walk(root, nil, func(at *field.Path, n *yamlv3.Node) {
		if at.String() == name {
			line = n.Line
		}
	})
	return line
}

func scalar(root *yamlv3.Node, key string) string {
	for i := 0; i+1 < len(root.Content); i += 2 {
		if root.Content[i].Value == key {
			return root.Content[i+1].Value
		}
	}
	return ""
}
