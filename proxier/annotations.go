// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"

	"github.com/tandem-proxy/tandem/proxier/maglev"
	"github.com/tandem-proxy/tandem/servicelb/nodereport"
)

// annotationPrefix begins the annotations that say how a Service is served, and aliasPrefix those of Cilium, which mean
// the same.
const (
	annotationPrefix = "service.tandem-proxy.dev/"
	aliasPrefix      = "service.cilium.io/"
)

// Annotations of Services.
const (
	// AnnotationAlgorithm is random or maglev.
	AnnotationAlgorithm = annotationPrefix + "lb-algorithm"
	// AnnotationTableSize is the size of Maglev tables in slots, one of maglev.Sizes.
	AnnotationTableSize = annotationPrefix + "maglev-table-size"
	// AnnotationForwarding is snat, dsr or hybrid.
	AnnotationForwarding = annotationPrefix + "forwarding-mode"
	// AnnotationType is a list of kinds of frontends, separated by commas. The Service gets no others.
	AnnotationType = annotationPrefix + "type"
	// AnnotationRangesPolicy is allow or deny: what spec.loadBalancerSourceRanges does with the clients in it.
	AnnotationRangesPolicy = annotationPrefix + "src-ranges-policy"
	// AnnotationRangesAction is drop or reject: what happens to the packets of clients that the source ranges do not admit.
	AnnotationRangesAction = annotationPrefix + "src-ranges-action"
	// AnnotationNodeSelector is a label selector: nodes that it does not match have no external frontends of the Service.
	AnnotationNodeSelector = annotationPrefix + "node-selector"
	// AnnotationNode is the value that the label of this name must have on such a node.
	AnnotationNode = annotationPrefix + "node"
)

// AnnotationWeight of an EndpointSlice is the weight of its endpoints, 0 to 65535. 0 is for
// maintenance: they get no new connections.
const AnnotationWeight = annotationPrefix + "weight"

// Aliases of annotations.
const (
	aliasAlgorithm = aliasPrefix + "lb-algorithm"
	aliasWeight    = aliasPrefix + "weight"
	aliasType      = aliasPrefix + "type"

	aliasForwarding   = aliasPrefix + "forwarding-mode"
	aliasRangesPolicy = aliasPrefix + "src-ranges-policy"
	aliasNodeSelector = aliasPrefix + "node-selector"
	aliasNode         = aliasPrefix + "node"
)

// ServiceAnnotations and SliceAnnotations are the keys that decisions depend on. One that ends in a slash stands for all
// that begin with it: those that are not known are reported.
var (
	ServiceAnnotations = []string{
		AnnotationFastPath, AnnotationAlgorithm, AnnotationTableSize, AnnotationForwarding, AnnotationType, AnnotationRangesPolicy, AnnotationRangesAction, AnnotationNodeSelector, AnnotationNode,
		aliasAlgorithm, aliasForwarding, aliasType, aliasRangesPolicy, aliasNodeSelector, aliasNode, annotationPrefix, nodereport.AnnotationAddresses,
	}
	SliceAnnotations = []string{AnnotationWeight, aliasWeight, annotationPrefix}
)

// annotation is one that is set.
type annotation struct{ key, value string }

func (a annotation) field() string { return "metadata.annotations[" + a.key + "]" }

// annotated finds an annotation by its key or its alias. If both are set, the key counts; other is the alias if that says
// something else.
func annotated(in map[string]string, key, alias string) (found, other annotation) {
	value, there := in[key]
	aliased, also := in[alias]
	switch {
	case there && also && value != aliased:
		return annotation{key, value}, annotation{alias, aliased}
	case there:
		return annotation{key, value}, annotation{}
	case also:
		return annotation{alias, aliased}, annotation{}
	}
	return annotation{}, annotation{}
}

// read reads an annotation by its key or its alias, which may be empty, and reports whether it is there and valid.
func read[T any](in map[string]string, key, alias string, parse func(string) (T, error), invalid func(field, format string, args ...any)) (value T, ok bool) {
	found, other := annotated(in, key, alias)
	if other.key != "" {
		invalid(other.field(), "%.32q differs from %s, which takes precedence", other.value, found.key)
	}
	if found.key == "" {
		return value, false
	}
	value, err := parse(found.value)
	if err != nil {
		invalid(found.field(), "%v; it is ignored", err)
	}
	return value, err == nil
}

// parseBalancing reads the annotations of a Service that are about balancing.
func parseBalancing(in map[string]string, invalid func(field, format string, args ...any)) (b Balancing) {
	b.Algorithm, _ = read(in, AnnotationAlgorithm, aliasAlgorithm, ParseAlgorithm, invalid)
	b.TableSize, _ = read(in, AnnotationTableSize, "", func(text string) (uint32, error) {
		size, err := strconv.ParseUint(text, 10, 32)
		if err != nil || !maglev.ValidSize(int(size)) {
			return 0, fmt.Errorf("%.32q is not one of %v", text, maglev.Sizes())
		}
		return uint32(size), nil
	}, invalid)
	return b
}

// parseForwarding reads how packets of clients outside reach backends on other nodes.
func parseForwarding(in map[string]string, invalid func(field, format string, args ...any)) Forwarding {
	mode, _ := read(in, AnnotationForwarding, aliasForwarding, ParseForwarding, invalid)
	return mode
}

// parseType reads the kinds of frontends that a Service is to have.
func parseType(in map[string]string, invalid func(field, format string, args ...any)) kindSet {
	set, _ := read(in, AnnotationType, aliasType, parseKinds, invalid)
	return set
}

// either is a parser of one of two words. It reports whether it is the second.
func either(first, second string) func(string) (bool, error) {
	return func(text string) (bool, error) {
		if text != first && text != second {
			return false, fmt.Errorf("%.32q is neither %s nor %s", text, first, second)
		}
		return text == second, nil
	}
}

// parseRangesPolicy reports whether the source ranges of a Service are those of clients that are not admitted.
func parseRangesPolicy(in map[string]string, invalid func(field, format string, args ...any)) (deny bool) {
	deny, _ = read(in, AnnotationRangesPolicy, aliasRangesPolicy, either("allow", "deny"), invalid)
	return deny
}

// parseRangesAction reports whether clients that the source ranges of a Service do not admit are rejected, and not dropped.
func parseRangesAction(in map[string]string, invalid func(field, format string, args ...any)) (reject bool) {
	reject, _ = read(in, AnnotationRangesAction, "", either("drop", "reject"), invalid)
	return reject
}

// parseNodeSelector reads which nodes serve the external frontends of a Service; nil for all.
func parseNodeSelector(in map[string]string, invalid func(field, format string, args ...any)) labels.Selector {
	requirements := func(text string) ([]labels.Requirement, error) { return labels.ParseToRequirements(text) }
	all, _ := read(in, AnnotationNodeSelector, aliasNodeSelector, requirements, invalid)
	key, _ := annotated(in, AnnotationNode, aliasNode)
	of, ok := read(in, AnnotationNode, aliasNode, func(node string) (*labels.Requirement, error) {
		return labels.NewRequirement(key.key, selection.Equals, []string{node})
	}, invalid)
	if ok {
		all = append(all, *of)
	}
	if len(all) == 0 {
		return nil
	}
	return labels.NewSelector().Add(all...)
}

// unknownAnnotations reports those with the prefix of this project that are not known. They take no place in a report
// from fields that are invalid.
func unknownAnnotations(in map[string]string, known []string, report func(field, message string)) {
	var unknown []string
	for key := range in {
		if strings.HasPrefix(key, annotationPrefix) && !slices.Contains(known, key) {
			unknown = append(unknown, key)
		}
	}
	slices.Sort(unknown)
	for i, key := range unknown {
		if i == maxReported {
			report("metadata.annotations", fmt.Sprintf("%d more annotations that begin with %s do not exist; they are ignored", len(unknown)-i, annotationPrefix))
			return
		}
		report(annotation{key: key}.field(), fmt.Sprintf("there is no such annotation; did you mean %s? It is ignored", nearest(key, known)))
	}
}

// nearest is the one of some annotations whose name takes the fewest changes of a letter to become a key.
func nearest(key string, known []string) (best string) {
	least := math.MaxInt
	for _, k := range known {
		if strings.HasPrefix(k, annotationPrefix) && k != annotationPrefix {
			if d := distance(k, key); d < least {
				best, least = k, d
			}
		}
	}
	return best
}

// distance is the number of letters to insert, to delete or to replace between two words (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}
			diagonal = row[j+1]
			row[j+1] = min(replaced, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// parseWeight reads the weight of a slice.
func parseWeight(in map[string]string, invalid func(field, format string, args ...any)) uint16 {
	weight, ok := read(in, AnnotationWeight, aliasWeight, func(text string) (uint16, error) {
		weight, err := strconv.ParseUint(text, 10, 16)
		if err != nil {
			return 0, fmt.Errorf("%.32q is not a number from 0 to 65535, so the weight is %d", text, DefaultWeight)
		}
		return uint16(weight), nil
	}, invalid)
	if !ok {
		return DefaultWeight
	}
	return weight
}
