// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/spf13/cobra"

	"github.com/tandem-proxy/tandem/proxier/ebpf/monitor"
)

// failureMonitor is what the command needs of monitor.Monitor.
type failureMonitor interface {
	Follow([]*ciliumebpf.Program) (attached int, err error)
	Next(ctx context.Context, deadline time.Time) (monitor.Failure, error)
	LeftOut() (uint64, error)
	Close() error
}

// monitorOptions are the flags of the monitor command.
type monitorOptions struct {
	service  serviceFilter
	client   addressFilter
	length   time.Duration
	rate     uint32
	interval time.Duration // between two looks for programs that were replaced
}

func (a *app) monitorCommand() *cobra.Command {
	o := monitorOptions{interval: 2 * time.Second}
	var of serviceFlags
	var client string
	c := &cobra.Command{
		Use:   "monitor [NAMESPACE/NAME[:PORT]]",
		Short: "Show connections and packets of Services that fail, as it happens",
		Long: `Shows what the eBPF programs of this node reject, drop or evict, until it is interrupted:
connections of sockets, with the process, and packets on devices, with the client.
Reasons are those of the packet verdict counters:

  rejected_no_backend      no endpoint takes connections, or an address in the range
                           of ClusterIPs without a Service
  dropped_policy           a policy Local, and no endpoint on this node
  dropped_source_range     loadBalancerSourceRanges do not have the client. At sockets
                           dropped_policy_or_source_range is one of these two
  dropped_no_flow          the table of connections is full
  rejected_no_source_port  all source ports towards the endpoint are in use
  dropped_no_route         there is no route to the endpoint
  dropped_rewrite          the packet could not be changed
  dropped_raced            the Service changed during each lookup
  pushed_out               a connection that was never established is evicted from the
                           table by a newer one
  passed_reset             a reset of no known connection, which goes on to the stack
  held_back                a packet of a connection that no program translated, as while
                           programs are attached again (Linux 6.4)

It attaches programs to functions of the proxy's programs, and removes them when it
ends, or is killed. Nothing of it is there otherwise. The kernel reports up to --rate
failures of all Services per second and CPU, and counts the rest. It needs Linux 5.17
on x86-64, 6.0 on arm64.

It does not show connections that succeed (see flows), ICMP errors, and what iptables
rules or IPVS serve.`,
		Example: `  tandemctl monitor
  tandemctl monitor shop/web --for 1m
  tandemctl monitor --client 198.51.100.7 -o json`,
		Args: args(cobra.MaximumNArgs(1)),
		RunE: func(c *cobra.Command, list []string) (err error) {
			if o.service, err = of.filter(list); err != nil {
				return err
			}
			if o.client, err = newAddressFilter("client", client); err != nil {
				return err
			}
			if o.rate == 0 {
				return usagef("--rate has to be above 0")
			}
			ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			if o.length > 0 {
				var cancel func()
				ctx, cancel = context.WithTimeout(ctx, o.length)
				defer cancel()
			}
			return a.watchFailures(ctx, &o)
		},
	}
	of.add(a, c, "")
	c.Flags().StringVar(&client, "client", "", "only packets of this client: an address, a CIDR, or ADDRESS:PORT")
	c.Flags().DurationVar(&o.length, "for", 0, "end after this time (default: when it is interrupted)")
	c.Flags().Uint32Var(&o.rate, "rate", 100, "failures of all Services that are reported per second and CPU")
	return c
}

// failureView is what the command shows of a failure.
type failureView struct {
	Time      time.Time       `json:"time"`
	Reason    string          `json:"reason"`
	Namespace string          `json:"namespace"`
	Name      string          `json:"name"`
	Port      string          `json:"port"`
	Protocol  string          `json:"protocol"`
	Client    *netip.AddrPort `json:"client"` // null for sockets
	Frontend  netip.AddrPort  `json:"frontend"`
	Process   string          `json:"process"` // empty for packets
	PID       int             `json:"pid"`
}

func (a *app) watchFailures(ctx context.Context, o *monitorOptions) (err error) {
	m, err := a.monitor(o.rate)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	names := frontendNames{missed: true}
	follow := func() error {
		return a.withInspector(func(i inspector) error {
			if names.missed { // reading all Services takes time
				if err := names.read(i); err != nil {
					return err
				}
			}
			return i.WithPrograms(func(programs []*ciliumebpf.Program) error {
				attached, err := m.Follow(programs)
				if err == nil && attached == 0 {
					err = errors.New("the programs of this node are of a version that cannot be monitored")
				}
				return err
			})
		})
	}
	if err := follow(); err != nil {
		return err
	}
	if !a.isData() {
		fmt.Fprintln(a.err, "Waiting for failures. Ctrl-C ends it.")
	}
	write := a.failureWriter()
	leftOut := uint64(0)
	tellLeftOut := func() error {
		now, err := m.LeftOut()
		if err == nil && now > leftOut {
			fmt.Fprintf(a.err, "%d more failures, of all Services, were not reported; --rate reports more\n", now-leftOut)
			leftOut = now
		}
		return err
	}
	for next := a.now().Add(o.interval); ctx.Err() == nil; {
		deadline := time.Now().Add(min(o.interval, 200*time.Millisecond))
		f, err := m.Next(ctx, deadline)
		switch {
		case err == nil:
			if v := names.view(&f); o.selects(&v) {
				if err := write(&v); err != nil {
					return err
				}
			}
		case errors.Is(err, os.ErrDeadlineExceeded):
		case ctx.Err() != nil:
		default:
			return err
		}
		if a.now().Before(next) {
			continue
		}
		next = a.now().Add(o.interval)
		if err := follow(); err != nil {
			return err
		}
		if err := tellLeftOut(); err != nil {
			return err
		}
	}
	return tellLeftOut()
}

func (o *monitorOptions) selects(v *failureView) bool {
	return o.service.selects(v.Namespace, v.Name, v.Port) && (o.client == addressFilter{} || v.Client != nil && o.client.selects(*v.Client))
}

func (a *app) failureWriter() func(*failureView) error {
	if a.isData() {
		return func(v *failureView) error { return a.writeStream("Failure", v) }
	}
	stream := a.newStream([]string{"TIME", "REASON", "SERVICE", "PORT", "PROTO", "CLIENT", "FRONTEND"})
	return func(v *failureView) error {
		service, client := "", ""
		if v.Name != "" {
			service = v.Namespace + "/" + v.Name
		}
		if v.Client != nil {
			client = v.Client.String()
		} else {
			client = v.Process + "[" + strconv.Itoa(v.PID) + "]"
		}
		return stream([]string{v.Time.Format("15:04:05.000"), v.Reason, service, v.Port, v.Protocol, client, v.Frontend.String()})
	}
}

// frontendName is the key of a frontend. NodePorts have the unspecified address.
type frontendName struct {
	at       netip.AddrPort
	protocol string
}

// frontendNames are the service ports of frontends.
type frontendNames struct {
	of     map[frontendName][3]string
	missed bool // a frontend was looked up that is not there: it may be new
}

func (n *frontendNames) read(i inspector) error {
	services, err := i.Services()
	if err != nil {
		return err
	}
	n.of, n.missed = map[frontendName][3]string{}, false
	for k := range services {
		s := &services[k]
		for _, f := range s.Frontends {
			n.of[frontendName{f.Address, s.Protocol}] = [3]string{s.Namespace, s.Name, s.Port}
		}
	}
	return nil
}

// view names the service port, if the frontend is of one.
func (n *frontendNames) view(f *monitor.Failure) failureView {
	v := failureView{Time: f.Time.UTC(), Reason: f.Reason, Protocol: f.Protocol.String(), Frontend: f.Frontend, Process: f.Process, PID: f.PID}
	if f.Client.IsValid() {
		v.Client = &f.Client
	}
	any := netip.IPv4Unspecified()
	if f.Frontend.Addr().Is6() {
		any = netip.IPv6Unspecified()
	}
	name, ok := n.of[frontendName{f.Frontend, v.Protocol}]
	if !ok {
		name, ok = n.of[frontendName{netip.AddrPortFrom(any, f.Frontend.Port()), v.Protocol}]
	}
	n.missed = n.missed || !ok
	v.Namespace, v.Name, v.Port = name[0], name[1], name[2]
	return v
}
