// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/servicelb"
)

// klipperInterval is how often DaemonSets are listed.
const klipperInterval = 10 * time.Second

// klipper deletes the DaemonSets of klipper-lb whose Services are served.
type klipper struct {
	client   kubernetes.Interface
	recorder record.EventRecorder
	interval time.Duration
	listed   time.Time
	// deleted are the Services whose DaemonSet was deleted. One that is created again stays.
	deleted map[types.NamespacedName]bool
	told    map[types.UID]bool
}

func newKlipper(client kubernetes.Interface, recorder record.EventRecorder) *klipper {
	return &klipper{interval: klipperInterval, client: client, recorder: recorder, deleted: map[types.NamespacedName]bool{}, told: map[types.UID]bool{}}
}

// sync deletes the DaemonSets of Services that all their nodes serve.
func (k *klipper) sync(ctx context.Context, list []servicelb.Outcome) error {
	if time.Since(k.listed) < k.interval {
		return nil
	}
	k.listed = time.Now()
	found, err := k.client.AppsV1().DaemonSets(metav1.NamespaceAll).List(ctx, metav1.ListOptions{LabelSelector: servicelb.LabelServiceName})
	if err != nil {
		return fmt.Errorf("list DaemonSets of klipper-lb: %w", err)
	}
	outcomes := make(map[types.NamespacedName]*servicelb.Outcome, len(list))
	for i := range list {
		s := list[i].Service
		outcomes[types.NamespacedName{Namespace: s.Namespace, Name: s.Name}] = &list[i]
	}
	var errs []error
	for i := range found.Items {
		d := &found.Items[i]
		of := types.NamespacedName{Namespace: d.Labels[servicelb.LabelServiceNamespace], Name: d.Labels[servicelb.LabelServiceName]}
		if o := outcomes[of]; o != nil && isServed(o) && d.DeletionTimestamp.IsZero() {
			errs = append(errs, k.delete(ctx, d, of, o.Service))
		}
	}
	return errors.Join(errs...)
}

// isServed: the Service has addresses, and the cache has seen that.
func isServed(o *servicelb.Outcome) bool {
	return len(o.Ingress) > 0 && len(o.Probing) == 0 && sameIngress(o.Ingress, o.Service.Status.LoadBalancer.Ingress)
}

func (k *klipper) delete(ctx context.Context, d *appsv1.DaemonSet, of types.NamespacedName, s *v1.Service) error {
	if k.deleted[of] {
		if !k.told[d.UID] {
			k.told[d.UID] = true
			k.recorder.Eventf(s, v1.EventTypeWarning, "KlipperReturned",
				"DaemonSet %s/%s was deleted and is there again: K3s' controller runs. Start the servers with --disable=servicelb, or turn this controller off", d.Namespace, d.Name)
		}
		return nil
	}
	err := k.client.AppsV1().DaemonSets(d.Namespace).Delete(ctx, d.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(d.UID))})
	if err := ignoreRaces(err); err != nil {
		return fmt.Errorf("delete DaemonSet %s/%s of klipper-lb: %w", d.Namespace, d.Name, err)
	}
	k.deleted[of] = true
	klog.FromContext(ctx).Info("Deleted the DaemonSet of klipper-lb, as the nodes serve its Service", "daemonSet", klog.KObj(d), "service", of)
	k.recorder.Eventf(s, v1.EventTypeNormal, "DeletedKlipper", "the nodes serve the Service; deleted DaemonSet %s/%s of klipper-lb", d.Namespace, d.Name)
	return nil
}
