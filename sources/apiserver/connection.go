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

// absentInterval is how often a missing optional resource is requested again. It can appear with
// an upgrade of the API server or a new role.
const absentInterval = 10 * time.Minute

// reminder is how often an unchanged failure is logged again: the last minutes of a log show
// it, without filling the log.
const reminder = 10 * time.Minute

// connection logs failures of list and watch requests for one resource: when a failure begins,
// when its kind changes, and when requests succeed again. client-go itself logs refused watches
// at V(4) only.
type connection struct {
	resource string
	optional string // see subscription
	clock    clock.PassiveClock

	mu     sync.Mutex
	class  string // kind of the current failure, or empty
	since  time.Time
	logged time.Time
}

func (c *connection) failed(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return // the requests fail because this process stops
	}
	logger := klog.FromContext(ctx)
	class, now := errorClass(err), c.clock.Now()
	without := c.optional != "" && isAbsent(err)

	c.mu.Lock()
	if c.class == "" {
		c.since = now
	}
	report := class != c.class || !without && now.Sub(c.logged) >= reminder
	c.class = class
	if report {
		c.logged = now
	}
	since := c.since
	c.mu.Unlock()

	if !report {
		logger.V(4).Info("Still cannot list or watch", "resource", c.resource, "err", err)
		return
	}
	if without {
		logger.Info("API server lacks an optional resource, continuing without it", "resource", c.resource, "consequence", c.optional, "err", err)
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
		klog.FromContext(ctx).Info("Watch recovered", "resource", c.resource,
			"failedFor", c.clock.Since(since).Round(time.Second))
	}
}

// isAbsent reports whether the API server lacks the resource or denies access to it.
func isAbsent(err error) bool {
	return apierrors.IsNotFound(err) || apierrors.IsMethodNotSupported(err) || apierrors.IsForbidden(err)
}

// errorClass returns the kind of a failure, without the parts that differ between attempts:
// local ports, and the random timeout in the URL.
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
