// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"slices"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/tandem-proxy/tandem/servicelb/nodereport"
)

func isOurs(c metav1.Condition) bool {
	return c.Type == nodereport.ConditionAdvertised || c.Type == nodereport.ConditionProbing
}

func hasConditions(s *v1.Service) bool { return slices.ContainsFunc(s.Status.Conditions, isOurs) }

// Forget takes the conditions off a Service, and its addresses too if that is asked for. It reports whether there was any.
func Forget(ctx context.Context, client kubernetes.Interface, s *v1.Service, addresses bool) (bool, error) {
	if !hasConditions(s) {
		return false, nil
	}
	after := s.DeepCopy()
	after.Status.Conditions = slices.DeleteFunc(after.Status.Conditions, isOurs)
	if addresses {
		after.Status.LoadBalancer = v1.LoadBalancerStatus{}
	}
	_, err := client.CoreV1().Services(s.Namespace).UpdateStatus(ctx, after, metav1.UpdateOptions{})
	return err == nil, ignoreRaces(err)
}

// ForgetAll takes the conditions off all Services and leaves their addresses, which another controller takes over. It returns how many
// Services had any.
func ForgetAll(ctx context.Context, client kubernetes.Interface) (n int, err error) {
	list, err := client.CoreV1().Services(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return 0, err
	}
	var errs []error
	for i := range list.Items {
		had, err := Forget(ctx, client, &list.Items[i], false)
		if had {
			n++
		}
		errs = append(errs, err)
	}
	return n, errors.Join(errs...)
}
