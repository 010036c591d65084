// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tandem-proxy/tandem/proxier/ebpf/inspect"
)

// flowsOptions are the flags of the flows command.
type flowsOptions struct {
	service         serviceFilter
	client, backend addressFilter
	at              string
	watch           bool
	interval        time.Duration
}

func (a *app) flowsCommand() *cobra.Command {
	var o flowsOptions
	var namespace, client, backend string
	c := &cobra.Command{
		Use:     "flows [NAMESPACE/NAME[:PORT]]",
		Aliases: []string{"flow", "connections"},
		Short:   "Show connections to Services, and where they go",
		Long: `Shows the connections that the eBPF programs of this node translate: those of
sockets on this node, translated when they connect, and those whose packets are
translated on devices, as of clients outside.

  AT        socket, or packets
  SOURCE    what the backend sees as the client, if it is another address
  STATE     TCP: opening, established, closing or closed. UDP packets: answered or
            unanswered. UDP sockets: connected or unconnected
  ACTION    deliver: to a backend on this node, or by its routes. forward:
            masqueraded and sent on past the network stack. remap port: of no
            Service; it gets another source port, as its own is taken
  IDLE      since the last packet
  REQUESTS  packets and bytes of the client; of a TCP socket, the payload that was
  REPLIES   acknowledged or received

Columns of sockets are empty where only the kernel's socket tables know, and the
network namespace of the socket cannot be opened: it takes the host's /proc, as in
pods with hostPID. TCP sockets are missing if the option ebpf.tcpPeerNames is off.
Connections of Services that other datapaths serve are not shown; 'conntrack -L' and
'ipvsadm -Lnc' have them.

With --watch, changes follow the list: flows that are new, that changed their state
or backend, and that ended. What begins and ends between two looks is not seen.`,
		Example: `  tandemctl flows
  tandemctl flows default/web --watch
  tandemctl flows -n shop --client 198.51.100.0/24
  tandemctl flows --backend 10.244.1.7:8080 -o json`,
		Args: args(cobra.MaximumNArgs(1)),
		RunE: func(c *cobra.Command, list []string) (err error) {
			if o.service, err = newServiceFilter(list, namespace); err != nil {
				return err
			}
			if o.client, err = newAddressFilter("client", client); err != nil {
				return err
			}
			if o.backend, err = newAddressFilter("backend", backend); err != nil {
				return err
			}
			if o.at != "" && o.at != inspect.AtSocket && o.at != inspect.AtPackets {
				return usagef("--at is %s or %s, not %q", inspect.AtSocket, inspect.AtPackets, o.at)
			}
			if o.interval <= 0 {
				return usagef("--interval has to be above 0, not %v", o.interval)
			}
			if o.watch {
				return a.watchFlows(c.Context(), &o)
			}
			flows, err := a.flows(c.Context(), &o)
			if err != nil {
				return err
			}
			if a.output == "json" {
				return writeJSON(a.out, struct {
					Flows []inspect.FlowView `json:"flows"`
				}{flows})
			}
			t := newTable(a.out, flowHead...)
			for i := range flows {
				t.row(flowRow(&flows[i])...)
			}
			return t.flush()
		},
	}
	c.Flags().StringVarP(&namespace, "namespace", "n", "", "only flows to Services of this namespace")
	c.Flags().StringVar(&client, "client", "", "only flows of this client: an address, a CIDR, or ADDRESS:PORT")
	c.Flags().StringVar(&backend, "backend", "", "only flows to this backend: an address, a CIDR, or ADDRESS:PORT")
	c.Flags().StringVar(&o.at, "at", "", "only flows that are translated at their "+inspect.AtSocket+", or by their "+inspect.AtPackets)
	c.Flags().BoolVarP(&o.watch, "watch", "w", false, "go on showing changes")
	c.Flags().DurationVar(&o.interval, "interval", time.Second, "time between two looks with --watch")
	return c
}

// flows are those that the filters select, sorted.
func (a *app) flows(ctx context.Context, o *flowsOptions) ([]inspect.FlowView, error) {
	flows := []inspect.FlowView{}
	err := a.withInspector(func(i inspector) error {
		return i.Flows(ctx, "/proc", func(v inspect.FlowView) {
			if o.selects(&v) {
				flows = append(flows, v)
			}
		})
	})
	slices.SortFunc(flows, func(x, y inspect.FlowView) int {
		return cmp.Or(strings.Compare(x.Namespace, y.Namespace), strings.Compare(x.Name, y.Name), strings.Compare(x.Port, y.Port),
			strings.Compare(x.Protocol, y.Protocol), x.Client.Compare(y.Client), x.Frontend.Compare(y.Frontend), x.Backend.Compare(y.Backend))
	})
	return flows, err
}

func (o *flowsOptions) selects(v *inspect.FlowView) bool {
	return o.service.selects(v.Namespace, v.Name, v.Port) && o.client.selects(v.Client) && o.backend.selects(v.Backend) &&
		(o.at == "" || o.at == v.At)
}

// addressFilter selects by prefix and port; the zero value selects all.
type addressFilter struct {
	prefix netip.Prefix
	port   uint16
}

func newAddressFilter(flag, text string) (f addressFilter, err error) {
	if text == "" {
		return f, nil
	}
	if p, err := netip.ParsePrefix(text); err == nil {
		return addressFilter{prefix: p.Masked()}, nil
	}
	at, err := netip.ParseAddrPort(text)
	if err != nil {
		addr, err := netip.ParseAddr(text)
		if err != nil {
			return f, usagef("--%s %q is no address, no CIDR, and no ADDRESS:PORT", flag, text)
		}
		at = netip.AddrPortFrom(addr, 0)
	}
	addr := at.Addr().Unmap()
	return addressFilter{netip.PrefixFrom(addr, addr.BitLen()), at.Port()}, nil
}

func (f addressFilter) selects(a netip.AddrPort) bool {
	return !f.prefix.IsValid() || f.prefix.Contains(a.Addr()) && (f.port == 0 || f.port == a.Port())
}

var flowHead = []string{"SERVICE", "PORT", "PROTO", "AT", "CLIENT", "FRONTEND", "SOURCE", "BACKEND", "STATE", "ACTION", "DEVICE", "IDLE", "RTT", "REQUESTS", "REPLIES"}

func flowRow(v *inspect.FlowView) []string {
	row := []string{"", v.Port, v.Protocol, v.At, v.Client.String(), v.Frontend.String(), "", v.Backend.String(), v.State, v.Action, v.Device, "", "", "", ""}
	if v.Name != "" {
		row[0] = v.Namespace + "/" + v.Name
	}
	if v.Source != nil {
		row[6] = v.Source.String()
	}
	if v.IdleSeconds != nil {
		row[11] = (time.Duration(*v.IdleSeconds) * time.Second).String()
	}
	if v.RTTMicroseconds != nil {
		row[12] = (time.Duration(*v.RTTMicroseconds) * time.Microsecond).String()
	}
	if v.Requests != nil {
		row[13] = number(v.Requests.Packets) + "/" + bytesText(v.Requests.Bytes)
	}
	if v.Replies != nil {
		row[14] = number(v.Replies.Packets) + "/" + bytesText(v.Replies.Bytes)
	}
	return row
}

// What happened to a flow since the last look.
const (
	flowPresent = "present" // it was there before the first look
	flowNew     = "new"
	flowChanged = "changed"
	flowEnded   = "ended"
)

// flowEvent is a line of --watch.
type flowEvent struct {
	Time  time.Time        `json:"time"`
	Event string           `json:"event"`
	Flow  inspect.FlowView `json:"flow"`
}

// flowKey is what stays the same of a flow.
type flowKey struct {
	protocol, at     string
	client, frontend netip.AddrPort
}

// watchFlows shows changes until ctx is done, or the output is closed.
func (a *app) watchFlows(ctx context.Context, o *flowsOptions) error {
	write := a.flowEventWriter()
	var known map[flowKey]inspect.FlowView
	for {
		flows, err := a.flows(ctx, o)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		if err := write(flowEvents(known, flows, a.now().UTC())); err != nil {
			return err
		}
		known = make(map[flowKey]inspect.FlowView, len(flows))
		for _, v := range flows {
			known[keyOfFlow(&v)] = v
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(o.interval):
		}
	}
}

func keyOfFlow(v *inspect.FlowView) flowKey { return flowKey{v.Protocol, v.At, v.Client, v.Frontend} }

// flowEvents compares two looks; known is nil before the first one.
func flowEvents(known map[flowKey]inspect.FlowView, flows []inspect.FlowView, at time.Time) (events []flowEvent) {
	now := map[flowKey]bool{}
	for i := range flows {
		v := &flows[i]
		key := keyOfFlow(v)
		now[key] = true
		before, ok := known[key]
		switch {
		case known == nil:
			events = append(events, flowEvent{at, flowPresent, *v})
		case !ok:
			events = append(events, flowEvent{at, flowNew, *v})
		case before.State != v.State || before.Backend != v.Backend:
			events = append(events, flowEvent{at, flowChanged, *v})
		}
	}
	var ended []flowEvent
	for key, v := range known {
		if !now[key] {
			ended = append(ended, flowEvent{at, flowEnded, v})
		}
	}
	slices.SortFunc(ended, func(x, y flowEvent) int {
		return cmp.Or(x.Flow.Client.Compare(y.Flow.Client), x.Flow.Frontend.Compare(y.Flow.Frontend))
	})
	return append(events, ended...)
}

// flowEventWriter writes a line for each event: columns as wide as they have been so far, or an object.
func (a *app) flowEventWriter() func([]flowEvent) error {
	if a.output == "json" {
		e := json.NewEncoder(a.out)
		e.SetEscapeHTML(false)
		return func(events []flowEvent) error {
			for _, event := range events {
				if err := e.Encode(event); err != nil {
					return err
				}
			}
			return nil
		}
	}
	var widths []int
	head := append([]string{"TIME", "EVENT"}, flowHead...)
	return func(events []flowEvent) error {
		var rows [][]string
		if widths == nil {
			widths = make([]int, len(head))
			rows = append(rows, head)
		}
		for i := range events {
			rows = append(rows, append([]string{events[i].Time.Format(time.TimeOnly), events[i].Event}, flowRow(&events[i].Flow)...))
		}
		for _, row := range rows {
			for i := range row {
				row[i] = cmp.Or(row[i], "-")
				widths[i] = max(widths[i], len(row[i]))
			}
		}
		for _, row := range rows {
			var line strings.Builder
			for i, cell := range row {
				fmt.Fprintf(&line, "%-*s  ", widths[i], cell)
			}
			if _, err := fmt.Fprintln(a.out, strings.TrimRight(line.String(), " ")); err != nil {
				return err
			}
		}
		return nil
	}
}
