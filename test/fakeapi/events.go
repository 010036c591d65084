// SPDX-License-Identifier: Apache-2.0

package fakeapi

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path"
	"slices"
	"strings"

	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Events are those that clients wrote, oldest first. One that comes again is a series, not
// another one.
func (a *API) Events() []eventsv1.Event {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.written)
}

// isEvent reports whether a path is that of Events in a namespace, or of one of them.
func isEvent(path string) bool {
	rest, ok := strings.CutPrefix(path, "/apis/events.k8s.io/v1/namespaces/")
	_, rest, _ = strings.Cut(rest, "/")
	return ok && (rest == "events" || strings.HasPrefix(rest, "events/"))
}

// write takes a new Event, or another moment of a series.
func (a *API) write(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client is gone
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	var event *eventsv1.Event
	switch r.Method {
	case http.MethodPost:
		event, err = a.add(body)
	case http.MethodPatch:
		event, err = a.patch(path.Base(r.URL.Path), body)
	default:
		err = fmt.Errorf("%s of Events is not served", r.Method)
	}
	if err != nil {
		answer(w, http.StatusBadRequest, metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonBadRequest, Message: err.Error()})
		return
	}
	event.APIVersion, event.Kind = eventsv1.SchemeGroupVersion.String(), "Event"
	_ = json.NewEncoder(w).Encode(event)
}

func (a *API) add(body []byte) (*eventsv1.Event, error) {
	object, _, err := codecs.UniversalDeserializer().Decode(body, nil, nil) // protobuf as well
	if err != nil {
		return nil, err
	}
	event, ok := object.(*eventsv1.Event)
	if !ok {
		return nil, fmt.Errorf("%T is no Event", object)
	}
	a.written = append(a.written, *event)
	return event, nil
}

func (a *API) patch(name string, body []byte) (*eventsv1.Event, error) {
	i := slices.IndexFunc(a.written, func(e eventsv1.Event) bool { return e.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("no Event %s", name)
	}
	// Of what is patched in an Event, nothing is a list: whichever way of merging is asked for,
	// each field replaces the one that was there.
	event := *a.written[i].DeepCopy()
	if err := json.Unmarshal(body, &event); err != nil {
		return nil, err
	}
	a.written[i] = event
	return &event, nil
}
