// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tandem-proxy/tandem/proxier"
)

const (
	// headerLimit is the timeout for reading a request's headers.
	headerLimit = 10 * time.Second
	// idleLimit is longer than the probe interval of load balancers.
	idleLimit = 2 * time.Minute
)

// retryInterval is the delay before another attempt to bind a port, if no sync comes first:
// the previous process may be about to exit.
const retryInterval = 5 * time.Second

// weightHeader has the number of local endpoints, for load balancers that use weights.
const weightHeader = "X-Load-Balancing-Endpoint-Weight"

// ServicesOptions are those of Services.
type ServicesOptions struct {
	// Families are the address families of this node.
	Families []proxier.Family
	// Healthy reports whether the proxy programs changes in time.
	Healthy func() bool
	// Reporter gets the ports that cannot be bound; nil ignores them.
	Reporter proxier.Reporter
	// Clock is set by tests; nil means the real one.
	Clock clock.Clock
}

// Services serves the health check of each Service with a healthCheckNodePort: it reports how
// many endpoints of the Service are ready on this node.
type Services struct {
	opts ServicesOptions
	wake chan struct{}

	mu     sync.RWMutex // guards all fields below
	checks map[types.NamespacedName]proxier.HealthCheck
	addrs  [proxier.Families][]netip.Addr
	// stale means that ports must be bound or closed, or that binding one failed.
	stale bool
}

var _ proxier.Observer = (*Services)(nil)

// NewServices makes Services. It binds no port before Run.
func NewServices(opts ServicesOptions) *Services {
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	return &Services{opts: opts, wake: make(chan struct{}, 1), checks: map[types.NamespacedName]proxier.HealthCheck{}}
}

// Queued implements proxier.Observer.
func (*Services) Queued(time.Time) {}

// Synced implements proxier.Observer: answers reflect the state after the sync.
func (s *Services) Synced(info proxier.SyncInfo) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range info.HealthChecks {
		was := s.checks[c.Service]
		if c.Check == nil {
			delete(s.checks, c.Service)
			s.stale = true
			continue
		}
		s.checks[c.Service] = *c.Check
		s.stale = s.stale || was.Port != c.Check.Port
	}
	if info.NodeRules != nil {
		for _, f := range s.opts.Families {
			addrs := info.NodeRules.HealthCheckAddrs[f]
			s.stale = s.stale || !slices.Equal(addrs, s.addrs[f])
			s.addrs[f] = addrs
		}
	}
	if !s.stale {
		return
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Run binds ports and answers until ctx is done. It retries ports that cannot be bound.
func (s *Services) Run(ctx context.Context) {
	open := map[types.NamespacedName]*service{}
	defer func() {
		for _, each := range open {
			each.close()
		}
	}()
	for complete := true; ; complete = s.converge(ctx, open) {
		var again <-chan time.Time
		if !complete {
			again = s.opts.Clock.After(retryInterval)
		}
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		case <-again:
		}
	}
}

// wanted returns the addresses and ports of each Service.
func (s *Services) wanted() map[types.NamespacedName]wanted {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stale = false
	all := make(map[types.NamespacedName]wanted, len(s.checks))
	for name, c := range s.checks {
		w := wanted{uid: c.UID, port: c.Port}
		for _, f := range s.opts.Families {
			for _, a := range s.addrs[f] {
				w.at = append(w.at, netip.AddrPortFrom(a, c.Port))
			}
		}
		all[name] = w
	}
	return all
}

type wanted struct {
	uid  types.UID
	port uint16
	at   []netip.AddrPort
}

// converge closes ports before it binds others, since a port may have moved to another
// Service. It also closes the connections of such a port, so that their clients do not get
// answers about the wrong Service.
func (s *Services) converge(ctx context.Context, open map[types.NamespacedName]*service) (complete bool) {
	want := s.wanted()
	for name, each := range open {
		w := want[name]
		if w.port != each.port { // or the Service has none
			each.close()
			delete(open, name)
			continue
		}
		each.keep(w.at)
	}
	complete = true
	for name, w := range want {
		if open[name] == nil {
			open[name] = s.newService(name, w.port)
		}
		for _, at := range w.at {
			if err := open[name].listen(ctx, at); err != nil {
				complete = false
				s.failed(ctx, name, w.uid, at, err)
			}
		}
	}
	return complete
}

func (s *Services) failed(ctx context.Context, name types.NamespacedName, uid types.UID, at netip.AddrPort, err error) {
	s.mu.Lock()
	s.stale = true
	s.mu.Unlock()
	if s.opts.Reporter == nil || ctx.Err() != nil {
		return
	}
	s.opts.Reporter.Report(proxier.Problem{
		Kind: "Service", Object: name, UID: uid, Field: "spec.healthCheckNodePort", Reason: proxier.ReasonNoHealthCheck,
		Message: fmt.Sprintf("cannot listen on %s for health checks of load balancers, retrying: %v", at, err),
	})
}

// service is the server of one Service.
type service struct {
	port      uint16
	server    *http.Server
	listeners map[netip.AddrPort]net.Listener
	serving   sync.WaitGroup
}

func (s *Services) newService(name types.NamespacedName, port uint16) *service {
	return &service{
		port: port,
		server: &http.Server{
			Handler:           http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.answer(w, r, name) }),
			ReadHeaderTimeout: headerLimit, IdleTimeout: idleLimit,
		},
		listeners: map[netip.AddrPort]net.Listener{},
	}
}

var networks = [proxier.Families]string{"tcp4", "tcp6"}

// listen binds an address, unless it is bound already.
func (s *service) listen(ctx context.Context, at netip.AddrPort) error {
	if s.listeners[at] != nil {
		return nil
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, networks[proxier.FamilyOf(at.Addr())], at.String())
	if err != nil {
		return err
	}
	s.listeners[at] = l
	s.serving.Go(func() {
		if err := s.server.Serve(l); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			klog.FromContext(ctx).Error(err, "Health check server failed", "address", at)
		}
	})
	return nil
}

// keep closes the listeners of all other addresses.
func (s *service) keep(list []netip.AddrPort) {
	for at, l := range s.listeners {
		if !slices.Contains(list, at) {
			_ = l.Close() // Serve returns in any case
			delete(s.listeners, at)
		}
	}
}

// close also closes connections, so that no client gets answers about a deleted Service.
func (s *service) close() {
	_ = s.server.Close()
	s.serving.Wait()
}

// answer writes the same answer as upstream's kube-proxy, byte by byte.
func (s *Services) answer(w http.ResponseWriter, r *http.Request, name types.NamespacedName) {
	family := proxier.IPv4
	if local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); ok {
		family = proxier.FamilyOf(local.AddrPort().Addr().Unmap())
	}
	s.mu.RLock()
	ready := s.checks[name].Ready[family]
	s.mu.RUnlock()
	healthy := s.opts.Healthy()
	code := http.StatusOK
	if ready == 0 || !healthy {
		code = http.StatusServiceUnavailable
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set(weightHeader, strconv.Itoa(ready))
	w.WriteHeader(code)
	// An error means that the client closed the connection.
	_, _ = fmt.Fprintf(w, "{\n\t\"service\": {\n\t\t\"namespace\": %q,\n\t\t\"name\": %q\n\t},\n\t\"localEndpoints\": %d,\n\t\"serviceProxyHealthy\": %t\n}",
		name.Namespace, name.Name, ready, healthy)
}
