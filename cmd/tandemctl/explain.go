// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/url"

	"github.com/spf13/cobra"

	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/proxier"
)

func (a *app) explainCommand() *cobra.Command {
	var server, device string
	var from offline
	c := &cobra.Command{
		Use:   "explain SOURCE[:PORT] DESTINATION:PORT[/PROTOCOL]",
		Short: "Show how a connection is served, and why",
		Long: `Shows how a new connection, or the first datagram of a UDP flow, is served: the
Service it is for, what kind of client the source is, whether it is admitted, and
every endpoint with the reason why it is eligible or not. The protocol is tcp (the
default), udp or sctp. An IPv6 address with a port is written in brackets.

By default it asks the kube-proxy of this node, at the address of its metrics
server. With --manifests it shows what a kube-proxy with those manifests would do.
Neither needs privileges.`,
		Example: `  tandemctl explain 10.244.1.7 10.96.0.10:53/udp
  tandemctl explain 198.51.100.1 203.0.113.9:443 --in-interface eth0
  tandemctl explain fd00:10:244:1::7 '[fd00:10:96::a]:80' -o json
  tandemctl explain 10.244.1.7 10.96.0.10:80 --manifests ./manifests --node node1 --cluster-cidr 10.244.0.0/16`,
		Args: args(cobra.ExactArgs(2)),
		RunE: func(c *cobra.Command, list []string) error {
			flow, err := parseFlow(list[0], list[1], device)
			if err != nil {
				return usageError{err}
			}
			if err := from.check(c.Flags()); err != nil {
				return err
			}
			var e *explain.Explanation
			if from.manifests != "" {
				e, err = from.explain(c.Context(), flow, func(text string) { fmt.Fprintf(a.err, "tandemctl: warning: %s\n", text) })
			} else {
				e, err = askServer[explain.Explanation](c.Context(), a, server, explain.Path, flowQuery(flow))
			}
			if err != nil {
				return err
			}
			if a.isData() {
				return a.writeData("Explanation", e)
			}
			return e.WriteText(a.out)
		},
	}
	fs := c.Flags()
	fs.StringVar(&device, "in-interface", "", "device that the packets arrive on (default: this host sends them)")
	addServerFlag(fs, &server)
	from.addFlags(fs)
	return c
}

func parseFlow(source, destination, device string) (proxier.Flow, error) {
	addrPort, protocol, err := explain.SplitDestination(destination)
	if err != nil {
		return proxier.Flow{}, err
	}
	return explain.ParseFlow(source, addrPort, protocol, device)
}

// flowQuery is a flow as a query for kube-proxy.
func flowQuery(flow proxier.Flow) url.Values {
	query := url.Values{
		explain.ParamSource: {sourceText(flow)}, explain.ParamDestination: {flow.Destination.String()},
		explain.ParamProtocol: {flow.Protocol.String()},
	}
	if flow.Device != "" {
		query.Set(explain.ParamDevice, flow.Device)
	}
	return query
}

func sourceText(flow proxier.Flow) string {
	if flow.Source.Port() == 0 {
		return flow.Source.Addr().String()
	}
	return flow.Source.String()
}
