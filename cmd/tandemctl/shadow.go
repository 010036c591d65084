// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"

	kubeproxy "github.com/tandem-proxy/tandem/cmd/kube-proxy/app"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/conntrack"
	"github.com/tandem-proxy/tandem/kernel/ipvs"
	"github.com/tandem-proxy/tandem/kernel/sysctl"
	"github.com/tandem-proxy/tandem/observe/preflight"
	"github.com/tandem-proxy/tandem/observe/shadow"
	"github.com/tandem-proxy/tandem/proxier"
)

// ipvsInterval is how often connections of IPVS are listed. One that ends earlier is missed; IPVS
// keeps closed TCP connections for two minutes, and UDP ones for five.
const ipvsInterval = 2 * time.Second

func (a *app) shadowCommand() *cobra.Command {
	var flags proxyFlags
	var length, settle, patience time.Duration
	c := &cobra.Command{
		Use:   "shadow [flags] [-- FLAGS-OF-KUBE-PROXY]",
		Short: "Compare what the running kube-proxy chooses with Tandem's decisions",
		Long: `Follows Services and the new connections of this node, and compares what the
running kube-proxy, usually upstream's, chose for each connection to a Service with
what Tandem decides: whether the address is a Service's, whether the endpoint is
eligible, whether the connection is masqueraded, and whether session affinity holds.
It attaches and writes nothing.

Connections come from conntrack's notifications, and from the connections of IPVS where
the kernel has it. Connections that programs translate at their socket do not show there.
The configuration has to be the running kube-proxy's, since clusterCIDR and others decide
about masquerading.

Exit codes: 0 if nothing disagrees, 1 if something does, 2 for errors.`,
		Example: `  tandemctl shadow --for 10m
  tandemctl shadow --for 1h -o json > report.json
  tandemctl shadow --for 1m --manifests ./manifests --node node1 -- --cluster-cidr=10.244.0.0/16`,
		Args: args(afterDash),
		RunE: func(c *cobra.Command, more []string) error {
			if length <= 0 || settle < 0 {
				return usagef("--for has to be positive, and --settle not negative")
			}
			ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			// The mode is the running proxy's; any will do here.
			flags.mode = config.ModeIPTables
			r, err := a.shadow(ctx, flags.args(more), length, settle, patience)
			if err != nil {
				return codeError{err, exitNo}
			}
			if a.isData() {
				err = a.writeData("ShadowReport", r)
			} else {
				err = r.WriteText(a.out)
			}
			if err == nil && r.Disagreements > 0 {
				return exitCode(exitError)
			}
			return err
		},
	}
	fs := c.Flags()
	flags.addFlags(fs)
	fs.DurationVar(&length, "for", 10*time.Minute, "how long to watch")
	fs.DurationVar(&settle, "settle", 10*time.Second, "how long the running kube-proxy may take to apply a change")
	fs.DurationVar(&patience, "timeout", 30*time.Second, "how long to wait for the objects")
	return c
}

// shadow watches for some time, or until ctx is done.
func (a *app) shadow(ctx context.Context, args []string, length, settle, patience time.Duration) (*shadow.Report, error) {
	f, err := kubeproxy.NewForecast(args)
	if err != nil {
		return nil, usageError{err}
	}
	warn := func(text string) { fmt.Fprintf(a.err, "tandemctl: warning: %s\n", text) }
	for _, text := range f.Warnings {
		warn(text)
	}
	if err := conntrack.EventsOn(sysctl.Root("/")); err != nil {
		return nil, err
	}
	if err := f.Connect(); err != nil {
		return nil, err
	}
	s := preflight.AskMetrics(ctx, addrPort(f.Config().KubeProxy.MetricsBindAddress))
	if s.Tandem && s.Mode == config.ModeEBPF {
		warn("the running kube-proxy is Tandem in mode ebpf: connections that its programs translate do not show in conntrack")
	}
	nodePorts, err := config.ParsePortRange(f.Config().Tandem.EBPF.NodePortRange)
	if err != nil {
		return nil, err
	}
	w := watcher{app: a, forecast: f, shadow: shadow.New(shadow.Options{Node: f.Node, Settle: settle, NodePorts: shadow.Range(nodePorts), Now: a.now}), warn: warn}
	return w.run(ctx, length, settle, patience)
}

// watcher brings connections and objects to a Shadow.
type watcher struct {
	*app
	forecast *kubeproxy.Forecast
	shadow   *shadow.Shadow
	table    *proxier.Table
	devices  map[netip.Addr]string
	warn     func(string)
}

// firstTime is a Shadow that tells when it was given all objects.
type firstTime struct {
	*shadow.Shadow
	once  sync.Once
	known chan struct{}
}

func (t *firstTime) Sync(ctx context.Context, update proxier.Update) error {
	err := t.Shadow.Sync(ctx, update)
	t.once.Do(func() { close(t.known) })
	return err
}

// queueSize is how many connections can wait to be compared.
const queueSize = 1 << 16

func (w *watcher) run(ctx context.Context, length, settle, patience time.Duration) (*shadow.Report, error) {
	group, ctx := errgroup.WithContext(ctx)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	tier := &firstTime{Shadow: w.shadow, known: make(chan struct{})}
	reporter := proxier.ReporterFunc(func(p proxier.Problem) { w.warn(problemText(p)) })
	group.Go(func() error {
		defer cancel()
		return w.forecast.Follow(ctx, tier, reporter, func(t *proxier.Table) {
			w.table = t
			w.shadow.Follow(t)
		})
	})
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		if err := group.Wait(); err != nil {
			return nil, err
		}
		return nil, context.Canceled
	case <-timer.C:
		cancel()
		return nil, errors.Join(errObjects(patience), group.Wait())
	case <-tier.known:
	}
	// The running proxy may not have applied the newest changes yet.
	select {
	case <-ctx.Done():
	case <-time.After(settle):
	}
	w.shadow.Start()
	flows, ready := make(chan conntrack.Flow, queueSize), make(chan struct{})
	watching, enough := context.WithTimeout(ctx, length)
	defer enough()
	group.Go(func() error {
		defer close(flows)
		lost := func() { w.shadow.Lost() }
		err := conntrack.Kernel{}.Events(watching, func() { close(ready) }, func(f conntrack.Flow) {
			select {
			case flows <- f:
			default:
				lost()
			}
		}, lost)
		if err != nil {
			cancel()
		}
		return err
	})
	group.Go(func() error {
		defer cancel()
		return w.compare(ctx, flows, ready, settle)
	})
	if err := group.Wait(); err != nil {
		return nil, err
	}
	w.shadow.Settled(true)
	return w.shadow.Report(), nil
}

// compare compares connections until there are no more, and then waits for changes that explain
// those that disagree.
func (w *watcher) compare(ctx context.Context, flows <-chan conntrack.Flow, ready <-chan struct{}, settle time.Duration) error {
	select {
	case <-ctx.Done():
		return nil
	case <-ready:
	}
	fmt.Fprintf(w.err, "tandemctl: watching %d service ports; interrupt to end early\n", w.table.Len())
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	if err := w.listIPVS(true); err != nil {
		return err
	}
	listed := w.now()
	for {
		select {
		case f, open := <-flows:
			if !open {
				if err := w.listIPVS(false); err != nil {
					return err
				}
				select {
				case <-ctx.Done(): // interrupted
				case <-time.After(settle):
				}
				return nil
			}
			if f.Zone == 0 && (f.Protocol == proxier.TCP || f.Protocol == proxier.UDP || f.Protocol == proxier.SCTP) {
				w.shadow.Observe(shadow.Connection{
					Protocol: f.Protocol, Client: f.Source, Dialed: f.Destination, Backend: f.Replies, Seen: f.Seen, Device: w.deviceOf(f.Source.Addr()),
				})
			}
		case <-ticker.C:
			w.shadow.Settled(false)
			if w.now().Sub(listed) >= ipvsInterval {
				listed = w.now()
				if err := w.listIPVS(false); err != nil {
					return err
				}
			}
		}
	}
}

func (w *watcher) listIPVS(first bool) error {
	list, err := ipvs.Connections(ipvs.ThreadNet)
	if err != nil {
		return err
	}
	connections := make([]shadow.Connection, 0, len(list))
	for _, c := range list {
		connections = append(connections, shadow.Connection{
			Protocol: c.Protocol, Client: c.Client, Dialed: c.Server, Backend: c.Destination, Device: w.deviceOf(c.Client.Addr()),
		})
	}
	w.shadow.ObserveIPVS(connections, first)
	return nil
}

// deviceOf returns the device by which packets of a client come in, as routes have it, if pods are
// known by devices.
func (w *watcher) deviceOf(client netip.Addr) string {
	if facts := w.table.Facts(); facts.Pods.Interface == "" {
		return ""
	}
	const most = 10000
	if name, known := w.devices[client]; known {
		return name
	}
	if w.devices == nil || len(w.devices) >= most {
		w.devices = map[netip.Addr]string{}
	}
	name := ""
	if routes, err := netlink.RouteGet(client.AsSlice()); err == nil && len(routes) > 0 {
		if l, err := netlink.LinkByIndex(routes[0].LinkIndex); err == nil && l.Attrs().Flags&net.FlagLoopback == 0 {
			name = l.Attrs().Name
		}
	}
	w.devices[client] = name
	return name
}
