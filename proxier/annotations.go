// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"fmt"
	"strconv"

	"github.com/tandem-proxy/tandem/proxier/maglev"
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
)

// AnnotationWeight of an EndpointSlice is the weight of its endpoints, 0 to 65535. 0 is for
// maintenance: they get no new connections.
const AnnotationWeight = annotationPrefix + "weight"

// Aliases of annotations.
const (
	aliasAlgorithm = aliasPrefix + "lb-algorithm"
	aliasWeight    = aliasPrefix + "weight"
)

// ServiceAnnotations and SliceAnnotations are the keys that decisions depend on.
var (
	ServiceAnnotations = []string{AnnotationFastPath, AnnotationAlgorithm, AnnotationTableSize, aliasAlgorithm}
	SliceAnnotations   = []string{AnnotationWeight, aliasWeight}
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

// parseBalancing reads the annotations of a Service that are about balancing.
func parseBalancing(in map[string]string, invalid func(field, format string, args ...any)) (b Balancing) {
	found, other := annotated(in, AnnotationAlgorithm, aliasAlgorithm)
	if other.key != "" {
		invalid(other.field(), "%.32q differs from %s, which counts", other.value, found.key)
	}
	if found.key != "" {
		var err error
		if b.Algorithm, err = ParseAlgorithm(found.value); err != nil {
			invalid(found.field(), "%v; it is ignored", err)
		}
	}
	if text, there := in[AnnotationTableSize]; there {
		size, err := strconv.ParseUint(text, 10, 32)
		if err != nil || !maglev.ValidSize(int(size)) {
			invalid(annotation{key: AnnotationTableSize}.field(), "%.32q is not one of %v; it is ignored", text, maglev.Sizes())
		} else {
			b.TableSize = uint32(size)
		}
	}
	return b
}

// parseWeight reads the weight of a slice.
func parseWeight(in map[string]string, invalid func(field, message string)) uint16 {
	found, other := annotated(in, AnnotationWeight, aliasWeight)
	if other.key != "" {
		invalid(other.field(), fmt.Sprintf("%.32q differs from %s, which counts", other.value, found.key))
	}
	if found.key == "" {
		return DefaultWeight
	}
	weight, err := strconv.ParseUint(found.value, 10, 16)
	if err != nil {
		invalid(found.field(), fmt.Sprintf("%.32q is not a number from 0 to 65535; the weight is %d", found.value, DefaultWeight))
		return DefaultWeight
	}
	return uint16(weight)
}
