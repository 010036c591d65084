// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"errors"

	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// mayWatch asks the API server whether this client may list and watch a resource of the core group, selected by fields.
// It returns nil if so, and a Forbidden error if not. Everyone may ask, whereas a request that is refused looks like an
// attack in audit logs.
func (c *Client) mayWatch(ctx context.Context, resource, fields string) error {
	for _, verb := range []string{"list", "watch"} {
		review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
			ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: verb, Resource: resource},
		}}
		if fields != "" { // API servers before Kubernetes 1.31 ignore it
			review.Spec.ResourceAttributes.FieldSelector = &authorizationv1.FieldSelectorAttributes{RawSelector: fields}
		}
		answer := &authorizationv1.SelfSubjectAccessReview{}
		err := c.authorization.Post().UseProtobufAsDefaultIfPreferred(true).Resource("selfsubjectaccessreviews").Body(review).Do(ctx).Into(answer)
		if err != nil {
			return err
		}
		if !answer.Status.Allowed {
			why := "no permission to " + verb
			if answer.Status.Reason != "" {
				why += ": " + answer.Status.Reason
			}
			return apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New(why))
		}
	}
	return nil
}
