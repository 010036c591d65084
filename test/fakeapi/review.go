// SPDX-License-Identifier: Apache-2.0

package fakeapi

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// reviewPath is where clients ask what they may do.
const reviewPath = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

// review allows what is served: a test that puts no Pods has a client that may not read them.
func (a *API) review(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client is gone
	}
	object, _, err := codecs.UniversalDeserializer().Decode(body, nil, nil) // protobuf as well
	review, ok := object.(*authorizationv1.SelfSubjectAccessReview)
	if err != nil || !ok || review.Spec.ResourceAttributes == nil {
		answer(w, http.StatusBadRequest, metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonBadRequest, Message: fmt.Sprintf("%T is no review: %v", object, err)})
		return
	}
	path := "/api/v1/" + review.Spec.ResourceAttributes.Resource
	if group := review.Spec.ResourceAttributes.Group; group != "" {
		path = "/apis/" + group + "/v1/" + review.Spec.ResourceAttributes.Resource
	}
	a.mu.Lock()
	review.Status.Allowed = a.resources[path] != nil
	a.mu.Unlock()
	review.APIVersion, review.Kind = authorizationv1.SchemeGroupVersion.String(), "SelfSubjectAccessReview"
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(review)
}
