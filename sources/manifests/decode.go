// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/tandem-proxy/tandem/proxier"
)

// labelServiceProxyName marks a Service that another proxy serves.
const labelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// digest identifies a text or an object. With half a SHA-256, collisions are practically
// impossible; one would hide a change.
type digest [16]byte

func digestOf(data []byte) digest {
	sum := sha256.Sum256(data)
	return digest(sum[:16])
}

type kind uint8

const (
	kindService kind = iota
	kindEndpointSlice
	kindNode
	kindServiceCIDR
)

func (k kind) String() string {
	return [...]string{"Service", "EndpointSlice", "Node", "ServiceCIDR"}[k]
}

// ofCluster reports whether objects of the kind have no namespace.
func (k kind) ofCluster() bool { return k == kindNode || k == kindServiceCIDR }

var kinds = map[typeMeta]kind{
	{APIVersion: "v1", Kind: "Service"}:                        kindService,
	{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}: kindEndpointSlice,
	{APIVersion: "v1", Kind: "Node"}:                           kindNode,
	{APIVersion: "networking.k8s.io/v1", Kind: "ServiceCIDR"}:  kindServiceCIDR,
}

// key names an object.
type key struct {
	kind            kind
	namespace, name string
}

func (k key) namespacedName() types.NamespacedName {
	return types.NamespacedName{Namespace: k.namespace, Name: k.name}
}

// object is one object of a document.
type object struct {
	key  key
	line int
	// The field of the object's kind is set. If the object does not decode, none is set,
	// and the key identifies the object that stays unchanged.
	service *v1.Service
	slice   *discoveryv1.EndpointSlice
	node    *v1.Node
	cidr    *networkingv1.ServiceCIDR
	// absent objects are valid, but not for this proxy.
	absent bool
	digest digest
}

func (o *object) valid() bool {
	return o.service != nil || o.slice != nil || o.node != nil || o.cidr != nil
}

// finding is a problem in a line of a file.
type finding struct {
	line    int
	problem proxier.Problem
}

// decoded is the contents of a document.
type decoded struct {
	objects  []object
	findings []finding
	// foreign has the types of objects that a proxy does not read.
	foreign []typeMeta
	// unknown means that the document cannot be read and may contain any object. No
	// object of its file may be treated as deleted.
	unknown bool
}

func (d *decoded) fail(line int, format string, args ...any) {
	d.unknown = true
	d.findings = append(d.findings, finding{line, proxier.Problem{
		Kind: "File", Reason: proxier.ReasonInvalidFile, Message: fmt.Sprintf(format, args...),
	}})
}

func (d *decoded) object(o *object, field, format string, args ...any) {
	d.findings = append(d.findings, finding{o.line, proxier.Problem{
		Kind: o.key.kind.String(), Object: o.key.namespacedName(), Field: field,
		Reason: proxier.ReasonInvalidObject, Message: fmt.Sprintf(format, args...),
	}})
}

// decode decodes a document. It is a pure function, and safe for any input.
func decode(doc document) decoded {
	var d decoded
	if doc.err != nil {
		d.fail(doc.line, "%v", doc.err)
		return d
	}
	if len(doc.text) > maxDocument {
		d.fail(doc.line, "document of %d bytes exceeds the limit of %d; split it: an EndpointSlice holds up to 1000 endpoints", len(doc.text), maxDocument)
		return d
	}
	text := doc.text
	var lenient error
	if !doc.json {
		var err error
		if text, err = yaml.YAMLToJSONStrict(doc.text); err != nil {
			lenient = err
			if text, err = yaml.YAMLToJSON(doc.text); err != nil {
				line, message := yamlError(doc.line, err)
				d.fail(line, "not valid YAML: %s", message)
				return d
			}
		}
	}
	before := len(d.findings)
	d.value(text, doc.line, doc.list)
	if lenient != nil && len(d.objects) > 0 && len(d.findings) == before {
		line, message := yamlError(doc.line, lenient)
		o := d.objects[0]
		o.line = line
		d.object(&o, "", "%s; the last one is used", message)
	}
	return d
}

// value decodes a JSON value: an object or a list of objects.
func (d *decoded) value(text []byte, line int, list typeMeta) {
	if bytes.Equal(bytes.TrimSpace(text), []byte("null")) {
		return
	}
	var header struct {
		typeMeta
		Metadata struct {
			Name      string `json:"name"`
			Namespace string `json:"namespace"`
		} `json:"metadata"`
	}
	if err := kjson.UnmarshalCaseSensitivePreserveInts(text, &header); err != nil {
		field, message := jsonError(err)
		if field == "" {
			d.fail(line, "not a Kubernetes object: %s", message)
		} else {
			d.fail(line, "not a Kubernetes object: %s: %s", field, message)
		}
		return
	}
	meta := header.typeMeta
	if meta == (typeMeta{}) {
		meta = list.item()
	}
	switch {
	case meta.Kind == "" || meta.APIVersion == "":
		d.fail(line, "an object needs apiVersion and kind")
		return
	case meta.isList():
		if list != (typeMeta{}) {
			d.fail(line, "a list inside a list is not supported")
			return
		}
		var items struct {
			Items []json.RawMessage `json:"items"`
		}
		if err := kjson.UnmarshalCaseSensitivePreserveInts(text, &items); err != nil {
			_, message := jsonError(err)
			d.fail(line, "items: %s", message)
			return
		}
		for _, item := range items.Items {
			d.value(item, line, meta)
		}
		return
	}
	k, known := kinds[meta]
	if !known {
		d.foreign = append(d.foreign, meta)
		return
	}

	o := object{key: key{k, header.Metadata.Namespace, header.Metadata.Name}, line: line}
	switch {
	case k.ofCluster():
		o.key.namespace = ""
	case o.key.namespace == "":
		o.key.namespace = metav1.NamespaceDefault
	}
	if o.key.name == "" {
		d.unknown = true
		d.object(&o, "metadata.name", "required; the object is not used")
		return
	}
	for field, value := range map[string]string{"metadata.name": o.key.name, "metadata.namespace": o.key.namespace} {
		if wrong := content.IsPathSegmentName(value); value != "" && len(wrong) > 0 {
			d.object(&o, field, "%q %s; the object is not used", value, strings.Join(wrong, ", "))
			return
		}
	}
	d.typed(&o, text)
	d.objects = append(d.objects, o)
}

// typed decodes the object itself.
func (d *decoded) typed(o *object, text []byte) {
	var into interface{ Marshal() ([]byte, error) }
	switch o.key.kind {
	case kindService:
		into = &v1.Service{}
	case kindEndpointSlice:
		into = &discoveryv1.EndpointSlice{}
	case kindNode:
		into = &v1.Node{}
	case kindServiceCIDR:
		into = &networkingv1.ServiceCIDR{}
	}
	strict, err := kjson.UnmarshalStrict(text, into)
	if err != nil {
		field, message := jsonError(err)
		d.object(o, field, "%s; the previous version of the object stays in use", message)
		return
	}
	for _, err := range strict {
		field := ""
		if match := quoted.FindStringSubmatch(err.Error()); match != nil {
			field = match[1]
		}
		d.object(o, field, "%s; ignored", err)
	}
	switch into := into.(type) {
	case *v1.Service:
		into.Namespace = o.key.namespace
		defaultService(into)
		o.service = into
		_, other := into.Labels[labelServiceProxyName]
		o.absent = other || into.Spec.ClusterIP == v1.ClusterIPNone
		if !o.absent && into.Spec.ClusterIP == "" && into.Spec.Type != v1.ServiceTypeExternalName {
			d.object(o, "spec.clusterIP", "required, since there is no API server to allocate one")
		}
	case *discoveryv1.EndpointSlice:
		into.Namespace = o.key.namespace
		defaultEndpointSlice(into)
		o.slice = into
		_, o.absent = into.Labels[v1.IsHeadlessService]
		if !o.absent && into.Labels[discoveryv1.LabelServiceName] == "" {
			d.object(o, "metadata.labels["+discoveryv1.LabelServiceName+"]", "required for the name of the Service; the slice is not used")
			o.absent = true
		}
		if !o.absent && into.AddressType != discoveryv1.AddressTypeIPv4 && into.AddressType != discoveryv1.AddressTypeIPv6 {
			d.object(o, "addressType", "%q is neither IPv4 nor IPv6; the slice is not used", into.AddressType)
			o.absent = true
		}
	case *v1.Node:
		into.Namespace = ""
		defaultNode(into)
		o.node = into
	case *networkingv1.ServiceCIDR:
		into.Namespace = ""
		o.cidr = into
		for i, text := range into.Spec.CIDRs {
			if _, err := proxier.ParseCIDR(text); err != nil {
				d.object(o, fmt.Sprintf("spec.cidrs[%d]", i), "%q is not a CIDR; ignored", text)
			}
		}
	}
	// The digest is of the object, since texts can differ in comments only.
	data, err := into.Marshal()
	if err != nil {
		// Impossible: an object that decodes can be encoded.
		d.object(o, "", "encode: %v", err)
	}
	o.digest = digestOf(data)
}

var (
	yamlLine = regexp.MustCompile(`\bline (\d+): `)
	quoted   = regexp.MustCompile(`"([^"]*)"`)
)

// yamlError converts the line number in an error to a line of the file, and returns the rest of
// the message.
func yamlError(first int, err error) (int, string) {
	message := err.Error()
	line := first
	if match := yamlLine.FindStringSubmatchIndex(message); match != nil {
		if n, err := strconv.Atoi(message[match[2]:match[3]]); err == nil && n > 0 {
			line = first + n - 1
		}
		message = message[match[1]:]
	}
	for _, prefix := range []string{"error converting YAML to JSON: ", "yaml: ", "unmarshal errors:\n"} {
		message = strings.TrimPrefix(message, prefix)
	}
	return line, strings.Join(strings.Fields(message), " ")
}

// jsonError returns the field and the message of an error.
func jsonError(err error) (field, message string) {
	if mismatch, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		expected := mismatch.Type.String()
		switch mismatch.Type.Kind() {
		case reflect.Struct, reflect.Map:
			expected = "object"
		case reflect.Slice:
			expected = "array"
		}
		return mismatch.Field, fmt.Sprintf("%s where %s is expected", mismatch.Value, expected)
	}
	return "", err.Error()
}
