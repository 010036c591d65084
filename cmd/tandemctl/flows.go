// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
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
	watchFlags
}

type flowList struct {
	Flows []inspect.FlowView `json:"flows"`
}

func (a *app) flowsCommand() *cobra.Command {
	var o flowsOptions
	var of serviceFlags
	var client, backend string
	c := &cobra.Command{
		Use:     "flows [NAMESPACE/NAME[:PORT]]",
		Aliases: []string{"flow", "connections"},
		Short:   "Show connections to Services, and where they go",
		Long: `Shows the connections that the eBPF programs of this node translate: those of
sockets on this node, translated when they connect, and those whose packets are
translated on devices, as of clients outside.

  AT        socket, or packets
  STATE     TCP: opening, established, closing or closed. UDP packets: answered or
            unanswered. UDP sockets: connected or unconnected
  AGE       since the first packet; of a socket, since its endpoint was chosen
  IDLE      since the last packet; of a TCP socket, since the last data
  REQUESTS  packets and bytes of the client; of a TCP socket, the payload that was
  REPLIES   acknowledged or received

and with -o wide

  SOURCE    what the backend sees as the client, if it is another address
  ACTION    deliver: to a backend on this node, or by its routes. forward:
            masqueraded and sent on past the network stack. direct: sent on in IP
            packets, and answered past this node (DSR). remap port: of no Service;
            it gets another source port, as its own is taken
  DEVICE    that the last packet of the client came in by
  RTT       the smoothed round-trip time of a TCP socket

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
			if o.service, err = of.filter(list); err != nil {
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
			return a.showList(c.Context(), &o.watchFlags, listing{
				kind: "FlowList", head: a.flowHead(),
				look: func(ctx context.Context) ([]watched, any, error) {
					flows, err := a.flows(ctx, &o)
					return a.watchedFlows(flows), flowList{flows}, err
				},
			})
		},
	}
	of.add(a, c, "flows to ")
	c.Flags().StringVar(&client, "client", "", "only flows of this client: an address, a CIDR, or ADDRESS:PORT")
	c.Flags().StringVar(&backend, "backend", "", "only flows to this backend: an address, a CIDR, or ADDRESS:PORT")
	c.Flags().StringVar(&o.at, "at", "", "only flows that are translated at their "+inspect.AtSocket+", or by their "+inspect.AtPackets)
	o.add(c.Flags())
	return c
}

// flows are those that the filters select, sorted.
func (a *app) flows(ctx context.Context, o *flowsOptions) ([]inspect.FlowView, error) {
	flows := []inspect.FlowView{}
	err := a.withInspector(func(i inspector) error {
		return i.Flows(ctx, o.at, "/proc", func(v inspect.FlowView) {
			if o.selects(&v) {
				flows = append(flows, v)
			}
		})
	})
	if errors.Is(err, inspect.ErrNoSockets) && o.at != inspect.AtSocket && ctx.Err() == nil {
		fmt.Fprintf(a.err, "tandemctl: only flows that are translated by their packets are shown: %v\n", err)
		o.at, err = inspect.AtPackets, nil // said once
	}
	slices.SortFunc(flows, func(x, y inspect.FlowView) int {
		return cmp.Or(strings.Compare(x.Namespace, y.Namespace), strings.Compare(x.Name, y.Name), strings.Compare(x.Port, y.Port),
			strings.Compare(x.Protocol, y.Protocol), x.Client.Compare(y.Client), x.Frontend.Compare(y.Frontend), x.Backend.Compare(y.Backend), cmp.Compare(x.Cookie, y.Cookie))
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

// flowHead are the columns; wide ones are shown with -o wide.
func (a *app) flowHead() []string {
	if a.output == outputWide {
		return []string{"SERVICE", "PORT", "PROTO", "AT", "CLIENT", "FRONTEND", "SOURCE", "BACKEND", "STATE", "ACTION", "DEVICE", "AGE", "IDLE", "RTT", "REQUESTS", "REPLIES"}
	}
	return []string{"SERVICE", "PORT", "PROTO", "AT", "CLIENT", "FRONTEND", "BACKEND", "STATE", "AGE", "IDLE", "REQUESTS", "REPLIES"}
}

func (a *app) flowRow(v *inspect.FlowView) []string {
	var service, source, rtt, requests, replies string
	if v.Name != "" {
		service = v.Namespace + "/" + v.Name
	}
	if v.Source != nil {
		source = v.Source.String()
	}
	if v.RTTMicroseconds != nil {
		rtt = (time.Duration(*v.RTTMicroseconds) * time.Microsecond).String()
	}
	if v.Requests != nil {
		requests = number(v.Requests.Packets) + "/" + bytesText(v.Requests.Bytes)
	}
	if v.Replies != nil {
		replies = number(v.Replies.Packets) + "/" + bytesText(v.Replies.Bytes)
	}
	client, frontend, backend := v.Client.String(), v.Frontend.String(), v.Backend.String()
	if a.output == outputWide {
		return []string{service, v.Port, v.Protocol, v.At, client, frontend, source, backend, v.State, v.Action, v.Device, secondsText(v.AgeSeconds), secondsText(v.IdleSeconds), rtt, requests, replies}
	}
	return []string{service, v.Port, v.Protocol, v.At, client, frontend, backend, v.State, secondsText(v.AgeSeconds), secondsText(v.IdleSeconds), requests, replies}
}

// secondsText is a time that may not be known.
func secondsText(seconds *int64) string {
	if seconds == nil {
		return ""
	}
	return (time.Duration(*seconds) * time.Second).String()
}

// flowKey is what stays the same of a flow. A UDP socket that is not connected may have several backends at one
// frontend.
func flowKey(v *inspect.FlowView) string {
	key := fmt.Sprint(v.Client, " ", v.Frontend, " ", v.Protocol, " ", v.At, " ", v.Cookie)
	if v.Cookie != 0 && v.Protocol != "TCP" {
		key += " " + v.Backend.String()
	}
	return key
}

// watchedFlows are rows to watch: what counts is where a flow goes, and its state.
func (a *app) watchedFlows(flows []inspect.FlowView) []watched {
	rows := make([]watched, len(flows))
	for i := range flows {
		v := &flows[i]
		rows[i] = watched{
			key:     flowKey(v),
			version: fmt.Sprint(v.State, v.Backend), cells: a.flowRow(v), object: v,
		}
	}
	return rows
}
