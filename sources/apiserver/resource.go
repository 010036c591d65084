// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
)

// Resource lists and watches one kind of object in all namespaces, with the same requests as
// client-go's typed clients.
type Resource struct {
	client rest.Interface
	name   string
	list   func() runtime.Object
}

// List lists the objects that the options select.
func (r Resource) List(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
	list := r.list()
	err := r.get(&opts).Do(ctx).Into(list)
	return list, err
}

// Watch watches the objects that the options select.
func (r Resource) Watch(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
	opts.Watch = true
	return r.get(&opts).Watch(ctx)
}

func (r Resource) get(opts *metav1.ListOptions) *rest.Request {
	var timeout time.Duration
	if opts.TimeoutSeconds != nil {
		timeout = time.Duration(*opts.TimeoutSeconds) * time.Second
	}
	return r.client.Get().UseProtobufAsDefaultIfPreferred(true).Resource(r.name).VersionedParams(opts, parameterCodec).Timeout(timeout)
}

// Events writes Events.
type Events struct{ client rest.Interface }

// Create writes a new Event.
func (e Events) Create(ctx context.Context, event *eventsv1.Event) error {
	return e.to(e.client.Post(), event).Body(event).Do(ctx).Error()
}

// Patch changes an existing Event by a strategic merge patch.
func (e Events) Patch(ctx context.Context, event *eventsv1.Event, patch []byte) error {
	return e.to(e.client.Patch(types.StrategicMergePatchType), event).Name(event.Name).Body(patch).Do(ctx).Error()
}

func (e Events) to(r *rest.Request, event *eventsv1.Event) *rest.Request {
	return r.UseProtobufAsDefaultIfPreferred(true).Namespace(event.Namespace).Resource("events")
}
