// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"

	"github.com/tandem-proxy/tandem/test/kubeadm"
)

// requests summarise the audit log of a user's requests.
type requests struct {
	// Granted are the permissions used, without duplicates, sorted.
	Granted []string
	// Refused describes each request that authentication or authorization refused.
	Refused []string
}

// auditEvent has the fields of an audit.k8s.io/v1 Event that are read here.
type auditEvent struct {
	Verb, RequestURI string
	User             struct{ Username string }
	ObjectRef        struct{ APIGroup, Resource, Subresource string }
	ResponseStatus   struct {
		Code    int
		Message string
	}
	Annotations map[string]string
}

// requestsOf reads an audit log. Its last line may be incomplete.
func requestsOf(log, user string) (r requests, err error) {
	f, err := os.Open(log)
	if err != nil {
		return r, err
	}
	defer f.Close()
	in := bufio.NewReader(f)
	for {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return r, err
		}
		var e auditEvent
		if err := json.Unmarshal(line, &e); err != nil {
			return r, fmt.Errorf("read audit log: %w", err)
		}
		r.add(&e, user)
	}
	slices.Sort(r.Granted)
	r.Granted = slices.Compact(r.Granted)
	return r, nil
}

func (r *requests) add(e *auditEvent, user string) {
	code := e.ResponseStatus.Code
	refused := code == http.StatusUnauthorized || code == http.StatusForbidden || e.Annotations["authorization.k8s.io/decision"] == "forbid"
	switch {
	// Requests without authentication have no user name.
	case refused && (e.User.Username == user || code == http.StatusUnauthorized):
		r.Refused = append(r.Refused, fmt.Sprintf("%s %s by %q: %d %s", e.Verb, e.RequestURI, e.User.Username, code, e.ResponseStatus.Message))
	case e.User.Username == user && code < http.StatusBadRequest:
		r.Granted = append(r.Granted, kubeadm.Permission(e.Verb, e.ObjectRef.APIGroup, e.ObjectRef.Resource, e.ObjectRef.Subresource))
	}
}
