// SPDX-License-Identifier: Apache-2.0

package fakeapi

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
)

// ServeHTTP answers lists and watches of whole clusters.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if r.Method != http.MethodGet && isEvent(r.URL.Path) {
		a.write(w, r)
		return
	}
	if r.Method == http.MethodPost && r.URL.Path == reviewPath {
		a.review(w, r)
		return
	}
	if r.Method != http.MethodGet {
		answer(w, http.StatusCreated, metav1.Status{Status: metav1.StatusSuccess})
		return
	}
	query := r.URL.Query()
	want, err := parseSelector(query)
	if err != nil {
		answer(w, http.StatusBadRequest, metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonBadRequest, Message: err.Error()})
		return
	}
	a.mu.Lock()
	served := a.resources[r.URL.Path]
	a.mu.Unlock()
	switch {
	case served == nil:
		answer(w, http.StatusNotFound, metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonNotFound, Message: r.URL.Path + " is not served"})
	case query.Get("watch") == "true" || query.Get("watch") == "1":
		a.watch(w, r, served, want)
	default:
		a.list(w, served, want)
	}
}

func answer(w http.ResponseWriter, code int, s metav1.Status) {
	s.Kind, s.APIVersion, s.Code = "Status", "v1", int32(code)
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(&s)
}

func parseSelector(query url.Values) (s selector, err error) {
	if s.labels, err = labels.Parse(query.Get("labelSelector")); err != nil {
		return s, err
	}
	s.fields, err = fields.ParseSelector(query.Get("fieldSelector"))
	return s, err
}

func (a *API) list(w http.ResponseWriter, r *resource, want selector) {
	var list struct {
		metav1.TypeMeta
		metav1.ListMeta `json:"metadata"`
		Items           []json.RawMessage `json:"items"`
	}
	list.APIVersion, list.Kind = r.kind.GroupVersion().String(), r.kind.Kind+"List"
	a.mu.Lock()
	list.ResourceVersion, list.Items = strconv.Itoa(a.version), []json.RawMessage{}
	for _, in := range r.selected(want) {
		list.Items = append(list.Items, in[asJSON])
	}
	a.mu.Unlock()
	_ = json.NewEncoder(w).Encode(&list)
}

// watch streams what happens, beginning with what there is for clients that
// list this way (WatchList) and for those that know nothing yet.
func (a *API) watch(w http.ResponseWriter, r *http.Request, from *resource, want selector) {
	var stream []byte
	event := func(what string, in encodings) {
		stream = fmt.Appendf(stream, `{"type":%q,"object":%s}`+"\n", what, in[asJSON])
	}
	if preferred(r.Header.Get("Accept")) == runtime.ContentTypeProtobuf {
		w.Header().Set("Content-Type", protobufStream)
		event = func(what string, in encodings) { stream = appendFrame(stream, what, in[asProtobuf]) }
	}
	query := r.URL.Query()
	since, _ := strconv.Atoi(query.Get("resourceVersion"))
	initial := query.Get("sendInitialEvents") == "true"

	a.mu.Lock()
	if initial || since == 0 {
		since = a.version
		for _, in := range from.selected(want) {
			event("ADDED", in)
		}
	}
	if initial {
		event("BOOKMARK", from.bookmark(since))
	}
	for {
		for _, e := range from.events {
			if what := e.seenBy(want); e.version > since && what != "" {
				event(what, e.in)
			}
		}
		since = a.version
		changed := a.changed
		a.mu.Unlock()

		if _, err := w.Write(stream); err != nil {
			return
		}
		stream = stream[:0]
		w.(http.Flusher).Flush()
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
		a.mu.Lock()
	}
}

// preferred returns the first supported format of an Accept header. Like an API server, it uses
// protobuf for watches if the client accepts it, whether or not as a stream.
func preferred(accept string) string {
	for clause := range strings.SplitSeq(accept, ",") {
		name, _, _ := mime.ParseMediaType(clause)
		if name == runtime.ContentTypeProtobuf || name == runtime.ContentTypeJSON {
			return name
		}
	}
	return runtime.ContentTypeJSON
}

// protobufStream is the media type of watches in protobuf.
const protobufStream = runtime.ContentTypeProtobuf + ";stream=watch"

// appendFrame adds an event as a message of metav1.WatchEvent behind its length.
func appendFrame(stream []byte, what string, object []byte) []byte {
	e := metav1.WatchEvent{Type: what, Object: runtime.RawExtension{Raw: object}}
	message, err := e.Marshal()
	if err != nil {
		panic(fmt.Sprintf("fakeapi: %v", err)) // it is a text and some bytes
	}
	return append(binary.BigEndian.AppendUint32(stream, uint32(len(message))), message...)
}

// bookmark marks the end of the initial objects at a version.
func (r *resource) bookmark(version int) encodings {
	made, err := scheme.New(r.kind)
	o, ok := made.(Object)
	if err != nil || !ok {
		panic(fmt.Sprintf("fakeapi: %s: %v", r.kind, err)) // there are objects of it
	}
	o.GetObjectKind().SetGroupVersionKind(r.kind)
	o.SetResourceVersion(strconv.Itoa(version))
	o.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	return encodingsOf(o)
}
