// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tandem-proxy/tandem/proxier/ebpf/inspect"
)

// topOptions are the flags of the top command.
type topOptions struct {
	service  serviceFilter
	interval time.Duration
	times    int
	by       string
}

func (a *app) topCommand() *cobra.Command {
	var o topOptions
	var of serviceFlags
	c := &cobra.Command{
		Use:   "top [NAMESPACE/NAME[:PORT]]",
		Short: "Show which Services have the most traffic",
		Long: `Shows rates of each service port that the eBPF programs of this node serve, those
with the most first, and anew after each interval. Service ports without traffic are
left out.

  CONN/S           new connections, and UDP sockets or flows
  REJECTED/S       rejected, as there is no endpoint
  DROPPED/S        dropped, as the source is in none of the allowed ranges, or as no
                   endpoint is local where only those may serve
  REFUSED/S        TCP connections that the endpoint refused by a reset: of clients
                   outside, of pods that opted out and, with the option
                   ebpf.serviceSignals, of sockets of this node
  UNANSWERED/S     TCP connections of the same that the endpoint did not answer,
                   counted when they time out
  PACKETS/S        packets and bytes that programs translate on devices, with IP
  BYTES/S          headers
  SOCKET BYTES/S   payload of TCP connections that are translated at sockets of this
                   node, counted when they end; part of --sort bytes; "-" without the
                   option ebpf.serviceSignals

--sort failures adds up what is rejected, dropped, refused and unanswered.`,
		Example: `  tandemctl top
  tandemctl top -n shop --sort bytes
  tandemctl top --times 1 --interval 10s -o json`,
		Args: args(cobra.MaximumNArgs(1)),
		RunE: func(c *cobra.Command, list []string) (err error) {
			if o.service, err = of.filter(list); err != nil {
				return err
			}
			if rateOf[o.by] == nil {
				return usagef("--sort is one of %s, not %q", strings.Join(rateNames, ", "), o.by)
			}
			if o.interval <= 0 {
				return usagef("--interval has to be above 0, not %v", o.interval)
			}
			return a.top(c.Context(), &o)
		},
	}
	of.add(a, c, "")
	c.Flags().DurationVar(&o.interval, "interval", 2*time.Second, "time between two looks")
	c.Flags().IntVar(&o.times, "times", 0, "end after so many tables; 0 goes on")
	c.Flags().StringVar(&o.by, "sort", "connections", "order by "+strings.Join(rateNames, ", "))
	return c
}

// rates are per second.
type rates struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Port      string `json:"port"`
	Protocol  string `json:"protocol"`

	Connections float64 `json:"connections"`
	Rejected    float64 `json:"rejected"`
	Dropped     float64 `json:"dropped"`
	Refused     float64 `json:"refused"`
	Unanswered  float64 `json:"unanswered"`
	Packets     float64 `json:"packets"`
	Bytes       float64 `json:"bytes"`
	// SocketBytes are null if connections of sockets are not watched, or there were none.
	SocketBytes *float64 `json:"socketBytes"`
}

func (r *rates) failures() float64 { return r.Rejected + r.Dropped + r.Refused + r.Unanswered }

func (r *rates) bytes() float64 {
	if r.SocketBytes == nil {
		return r.Bytes
	}
	return r.Bytes + *r.SocketBytes
}

var (
	rateNames = []string{"connections", "failures", "rejected", "dropped", "refused", "unanswered", "packets", "bytes"}
	rateOf    = map[string]func(*rates) float64{
		"connections": func(r *rates) float64 { return r.Connections },
		"failures":    (*rates).failures,
		"rejected":    func(r *rates) float64 { return r.Rejected },
		"dropped":     func(r *rates) float64 { return r.Dropped },
		"refused":     func(r *rates) float64 { return r.Refused },
		"unanswered":  func(r *rates) float64 { return r.Unanswered },
		"packets":     func(r *rates) float64 { return r.Packets },
		"bytes":       (*rates).bytes,
	}
)

func (a *app) top(ctx context.Context, o *topOptions) error {
	read := func() (services []inspect.ServiceView, at time.Time, err error) {
		err = a.withInspector(func(i inspector) error {
			all, err := i.Services()
			services = only(all, func(s *inspect.ServiceView) bool { return o.service.selects(s.Namespace, s.Name, s.Port) })
			return err
		})
		return services, a.now(), err
	}
	before, since, err := read()
	if err != nil {
		return err
	}
	write := a.topWriter(o)
	for n := 0; o.times == 0 || n < o.times; n++ {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(o.interval):
		}
		services, at, err := read()
		if err != nil {
			return err
		}
		if err := write(at, ratesOf(before, services, at.Sub(since), o.by)); err != nil {
			return err
		}
		before, since = services, at
	}
	return nil
}

// counts are those of a service port at one look: of clients outside, of pods that opted out, and of sockets of this node.
type counts struct {
	inspect.CountersView
	socketBytes uint64
}

func countsOf(s *inspect.ServiceView) counts {
	c := counts{CountersView: s.Counters}
	if g := s.Signals; g != nil {
		c.Refused += g.Refused
		c.Unanswered += g.Unanswered
		c.socketBytes = g.SentBytes + g.ReceivedBytes
	}
	return c
}

// ratesOf compares two looks.
func ratesOf(before, after []inspect.ServiceView, elapsed time.Duration, by string) []rates {
	type key struct {
		namespace, name, port, protocol string
		id                              uint32
	}
	keyOf := func(s *inspect.ServiceView) key { return key{s.Namespace, s.Name, s.Port, s.Protocol, s.ID} }
	old := map[key]counts{}
	for i := range before {
		old[keyOf(&before[i])] = countsOf(&before[i])
	}
	list := []rates{}
	for i := range after {
		s := &after[i]
		now, then := countsOf(s), old[keyOf(s)] // zeros of one that is new
		per := func(now, then uint64) float64 {
			// Traffic of a flow that ends while it is read may be missing once.
			return float64(max(int64(now-then), 0)) / max(elapsed.Seconds(), 1e-3)
		}
		r := rates{
			Namespace: s.Namespace, Name: s.Name, Port: s.Port, Protocol: s.Protocol,
			Connections: per(now.Connections, then.Connections), Rejected: per(now.Rejected, then.Rejected), Dropped: per(now.Dropped, then.Dropped),
			Refused: per(now.Refused, then.Refused), Unanswered: per(now.Unanswered, then.Unanswered),
			Packets: per(now.Packets, then.Packets), Bytes: per(now.Bytes, then.Bytes),
		}
		if s.Signals != nil {
			r.SocketBytes = new(per(now.socketBytes, then.socketBytes))
		}
		if r.Connections+r.failures()+r.Packets+r.bytes() > 0 {
			list = append(list, r)
		}
	}
	slices.SortStableFunc(list, func(x, y rates) int { return cmp.Compare(rateOf[by](&y), rateOf[by](&x)) })
	return list
}

// topWriter writes one table after the other, as many rows as fit on a terminal; or objects, a line each.
func (a *app) topWriter(o *topOptions) func(time.Time, []rates) error {
	if a.isData() {
		return func(at time.Time, list []rates) error {
			return a.writeStream("ServiceRates", struct {
				Time     time.Time `json:"time"`
				Services []rates   `json:"services"`
			}{at.UTC(), list})
		}
	}
	first := true
	return func(at time.Time, list []rates) error {
		rows := len(list)
		if _, height := terminalSize(a.out); height > 0 && o.times != 1 {
			fmt.Fprint(a.out, "\x1b[H\x1b[2J") // from the top of an empty screen
			rows = min(rows, max(1, height-4))
		} else if !first {
			fmt.Fprintln(a.out)
		}
		first = false
		fmt.Fprintf(a.out, "%s, every %v, %d service ports with traffic, by %s\n", at.UTC().Format(time.TimeOnly), o.interval, len(list), o.by)
		t := newTable(a.tables(), "SERVICE", "PORT", "PROTO", "CONN/S", "REJECTED/S", "DROPPED/S", "REFUSED/S", "UNANSWERED/S", "PACKETS/S", "BYTES/S", "SOCKET BYTES/S")
		for i := range list[:rows] {
			r, socketBytes := &list[i], ""
			if r.SocketBytes != nil {
				socketBytes = bytesText(uint64(*r.SocketBytes))
			}
			t.row(r.Namespace+"/"+r.Name, r.Port, r.Protocol, rateText(r.Connections), rateText(r.Rejected), rateText(r.Dropped), rateText(r.Refused), rateText(r.Unanswered),
				rateText(r.Packets), bytesText(uint64(r.Bytes)), socketBytes)
		}
		return t.flush()
	}
}

func rateText(r float64) string {
	if r > 0 && r < 10 {
		return strconv.FormatFloat(r, 'f', 1, 64)
	}
	return strconv.FormatFloat(r, 'f', 0, 64)
}
