// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/pprof"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/component-base/configz"
	"k8s.io/component-base/logs"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/metrics/prometheus/slis"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/observe/events"
	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/observe/status"
	"github.com/tandem-proxy/tandem/sources/otherproxy"
)

const (
	// listenInterval is upstream's: something else may hold the port while
	// it is being replaced.
	listenInterval = 5 * time.Second
	// shutdownLimit is how long a scrape under way may take to finish.
	shutdownLimit = time.Second
)

// server is one HTTP server.
type server struct {
	name     string
	address  string
	handler  http.Handler
	hardFail bool
	// failed is called each time the address cannot be bound.
	failed func(error)
	clock  clock.Clock
}

func (p *proxy) servers() []*server {
	k := &p.opts.Config.KubeProxy
	healthMux := http.NewServeMux()
	p.health.Install(healthMux)
	p.ready.Install(healthMux)
	p.reports.server.Install(healthMux)
	all := []*server{
		{
			name: "health", address: k.HealthzBindAddress, handler: healthMux, hardFail: k.BindAddressHardFail,
			failed: p.bindFailed("FailedToStartProxierHealthcheck", "StartKubeProxy"), clock: clock.RealClock{},
		},
		{
			name: "metrics", address: k.MetricsBindAddress, handler: p.metricsMux(), hardFail: k.BindAddressHardFail,
			failed: p.bindFailed("FailedToStartMetricServer", "StartKubeProxy"), clock: clock.RealClock{},
		},
	}
	if k.HealthzBindAddress == "" { // --healthz-port=0
		return all[1:]
	}
	return all
}

// bindFailed records an Event on the Node.
func (p *proxy) bindFailed(reason, action string) func(error) {
	return func(err error) {
		if p.recorder != nil {
			p.recorder.Eventf(events.NodeReference(p.opts.nodeName), v1.EventTypeWarning, reason, action, "%v", err)
		}
	}
}

func (p *proxy) metricsMux() *http.ServeMux {
	mux := http.NewServeMux()
	text := func(path, body string, asked func(context.Context)) {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			asked(r.Context())
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			w.Header().Set("X-Content-Type-Options", "nosniff")
			// The client is gone if this fails.
			_, _ = io.WriteString(w, body)
		})
	}
	text("/healthz", "ok", func(ctx context.Context) {
		// What upstream's only check there is called. It does not fail.
		_ = slis.ObserveHealthcheck(ctx, "ping", "healthz", slis.Success)
	})
	text("/proxyMode", string(p.mode.name()), func(context.Context) {})
	mux.Handle("/metrics", legacyregistry.Handler())
	slis.SLIMetrics{}.Install(mux)
	configz.InstallHandler(mux)
	p.installZPages(mux)
	mux.HandleFunc("GET "+status.Path, p.answerStatus)
	mux.HandleFunc("GET "+explain.Path, p.explain.flow)
	mux.HandleFunc("GET "+explain.PlacementsPath, p.explain.placements)
	mux.HandleFunc("GET "+explain.BackendsPath, p.explain.backends)
	if p.opts.Config.KubeProxy.EnableProfiling {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
		mux.HandleFunc("/debug/flags/v", setVerbosity)
	}
	return mux
}

// setVerbosity changes -v of the running process to the number in the body.
func setVerbosity(w http.ResponseWriter, r *http.Request) {
	const longest = 8 // digits
	tell := func(code int, text string) {
		w.Header().Set("Content-Type", "text/plain")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.WriteHeader(code)
		_, _ = io.WriteString(w, text+"\n") // the client is gone if this fails
	}
	if r.Method != http.MethodPut {
		tell(http.StatusNotAcceptable, "unsupported http method")
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, longest))
	if err != nil {
		tell(http.StatusBadRequest, err.Error())
		return
	}
	answer, err := logs.GlogSetter(string(body))
	if err != nil {
		tell(http.StatusBadRequest, err.Error())
		return
	}
	tell(http.StatusOK, answer)
}

// run serves until ctx is done. While the address cannot be bound it tries
// again, unless that is to be fatal.
func (s *server) run(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	var lc net.ListenConfig
	for failures := 0; ; failures++ {
		listener, err := lc.Listen(ctx, "tcp", s.address)
		if err == nil {
			logger.V(2).Info("Serving", "server", s.name, "address", s.address)
			err = s.serve(ctx, listener)
		}
		if ctx.Err() != nil {
			return nil
		}
		err = fmt.Errorf("%s server on %s: %w%s", s.name, s.address, err, s.heldBy(ctx, err))
		if s.failed != nil {
			s.failed(err)
		}
		if s.hardFail {
			return err
		}
		if failures == 0 {
			logger.Error(err, "Cannot serve; retrying", "every", listenInterval)
		}
		timer := s.clock.NewTimer(listenInterval)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C():
		}
	}
}

// heldBy names the process that listens at the port, if that is why the port cannot be bound and the
// process is visible.
func (s *server) heldBy(ctx context.Context, err error) string {
	_, text, splitErr := net.SplitHostPort(s.address)
	port, parseErr := strconv.ParseUint(text, 10, 16)
	if !errors.Is(err, unix.EADDRINUSE) || splitErr != nil || parseErr != nil {
		return ""
	}
	if holder := (&otherproxy.Finder{}).Holder(ctx, uint16(port)); holder != "" {
		return " by " + holder
	}
	return ""
}

func (s *server) serve(ctx context.Context, listener net.Listener) error {
	httpServer := &http.Server{Handler: s.handler, ReadHeaderTimeout: 10 * time.Second}
	done := make(chan error, 1)
	go func() { done <- httpServer.Serve(listener) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	// ctx is over; what is being answered gets a moment of its own.
	limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownLimit)
	defer cancel()
	if err := httpServer.Shutdown(limit); err != nil {
		_ = httpServer.Close()
	}
	if err := <-done; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
