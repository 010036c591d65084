// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"errors"
	"net"
	"net/url"
	"sync"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// absentInterval is how often the API server is asked whether it offers by now
// what it did not: an upgrade, or a role that somebody adds.
const absentInterval = 10 * time.Minute

// reminder is how often a failure that does not change is logged again: often
// enough for whoever looks at the last minutes of a log, rarely enough for
// whoever pays for it.
const reminder = 10 * time.Minute

// connection logs what becomes of the list and watch requests for one
// resource: a failure when it begins and when it turns into another one, and
// the recovery. client-go alone is silent (at V(4)) about a watch it cannot
// reopen because the server refuses connections.
type connection struct {
	resource string
	optional string // see feed
	clock    clock.PassiveClock

	mu     sync.Mutex
	class  string // what is failing, empty while nothing is
	since  time.Time
	logged time.Time
}

func (c *connection) failed(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return // the requests fail because this process ends
	}
	logger := klog.FromContext(ctx)
	class, now := errorClass(err), c.clock.Now()
	without := c.optional != "" && isAbsent(err)

	c.mu.Lock()
	if c.class == "" {
		c.since = now
	}
	tell := class != c.class || !without && now.Sub(c.logged) >= reminder
	c.class = class
	if tell {
		c.logged = now
	}
	since := c.since
	c.mu.Unlock()

	if !tell {
		logger.V(4).Info("Still cannot list or watch", "resource", c.resource, "err", err)
		return
	}
	if without {
		logger.Info("The API server does not offer this; going on without", "resource", c.resource, "consequence", c.optional, "err", err)
		return
	}
	logger.Error(err, "Cannot list or watch, keeping the last known state", "resource", c.resource,
		"failingFor", now.Sub(since).Round(time.Second))
}

func (c *connection) succeeded(ctx context.Context) {
	c.mu.Lock()
	failing, since := c.class != "", c.since
	c.class = ""
	c.mu.Unlock()
	if failing {
		klog.FromContext(ctx).Info("Watching again", "resource", c.resource,
			"failedFor", c.clock.Since(since).Round(time.Second))
	}
}

// isAbsent says that the API server does not know the resource, or does not let
// this proxy see it.
func isAbsent(err error) bool {
	return apierrors.IsNotFound(err) || apierrors.IsMethodNotSupported(err) || apierrors.IsForbidden(err)
}

// errorClass names the kind of a failure without what differs from one attempt
// to the next: local ports, and the random timeout in the URL.
func errorClass(err error) string {
	if reason := apierrors.ReasonForError(err); reason != metav1.StatusReasonUnknown {
		return string(reason)
	}
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno.Error()
	}
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		return "timeout"
	}
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return op.Op + ": " + op.Err.Error()
	}
	if request, ok := errors.AsType[*url.Error](err); ok {
		return request.Err.Error()
	}
	return err.Error()
}
