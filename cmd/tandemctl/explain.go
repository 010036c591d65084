// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tandem-proxy/tandem/explain"
	"github.com/tandem-proxy/tandem/proxier"
)

// errNobodyAnswers says that no process serves explanations.
var errNobodyAnswers = errors.New("no kube-proxy answers")

// defaultServers are where kube-proxy serves metrics unless told otherwise.
var defaultServers = []string{"127.0.0.1:10249", "[::1]:10249"}

// answerLimit is for the largest of Services on a busy node.
const answerLimit = 30 * time.Second

func (a *app) explainCommand() *cobra.Command {
	var format, server, device string
	var from offline
	c := &cobra.Command{
		Use:   "explain SOURCE[:PORT] DESTINATION:PORT[/PROTOCOL]",
		Short: "Show what becomes of a connection, and why",
		Long: `Shows what becomes of a new connection, or of the first datagram of a flow: which
Service it is for, who the source counts as, whether it is let in, and every
endpoint with the reason why it is eligible or is not. The protocol is tcp
(unless given), udp or sctp. An IPv6 address with a port goes in brackets.

It asks the kube-proxy of this node, at the address where that serves metrics.
With --manifests it asks nobody, and shows what a kube-proxy with those
manifests would do; no privileges are needed for either.`,
		Example: `  tandemctl explain 10.244.1.7 10.96.0.10:53/udp
  tandemctl explain 198.51.100.1 203.0.113.9:443 --in-interface eth0
  tandemctl explain fd00:10:244:1::7 '[fd00:10:96::a]:80' -o json
  tandemctl explain 10.244.1.7 10.96.0.10:80 --manifests ./manifests --node node1 --cluster-cidr 10.244.0.0/16`,
		Args: args(cobra.ExactArgs(2)),
		RunE: func(c *cobra.Command, list []string) error {
			if format != "text" && format != "json" {
				return usagef("output format %q is neither text nor json", format)
			}
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
				e, err = a.askServer(c.Context(), server, flow)
			}
			if err != nil {
				return err
			}
			if format == "json" {
				return writeJSON(a.out, e)
			}
			return e.WriteText(a.out)
		},
	}
	fs := c.Flags()
	fs.StringVarP(&format, "output", "o", "text", "output format: text or json")
	fs.StringVar(&device, "in-interface", "", "device by which the flow comes in (default: this host sends it)")
	fs.StringVar(&server, "server", "", "address and port at which kube-proxy serves metrics (default: "+strings.Join(defaultServers, ", then ")+")")
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

// askServer asks kube-proxy; without an address, wherever it is by default.
func (a *app) askServer(ctx context.Context, server string, flow proxier.Flow) (*explain.Explanation, error) {
	servers := a.servers
	if server != "" {
		address, found := strings.CutPrefix(server, "http://")
		if !found && strings.Contains(server, "://") || strings.ContainsAny(strings.TrimSuffix(address, "/"), "/?#@") {
			return nil, usagef("--server %q: want an address and port, 127.0.0.1:10249", server)
		}
		servers = []string{strings.TrimSuffix(address, "/")}
	}
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	var failed []string
	for _, s := range servers {
		e, err := ask(ctx, s, flow)
		if dial, ok := errors.AsType[*net.OpError](err); !ok || dial.Op != "dial" {
			return e, err
		}
		failed = append(failed, err.Error())
	}
	return nil, fmt.Errorf("%w (%s)", errNobodyAnswers, strings.Join(failed, "; "))
}

func ask(ctx context.Context, server string, flow proxier.Flow) (*explain.Explanation, error) {
	query := url.Values{
		explain.ParamSource: {sourceText(flow)}, explain.ParamDestination: {flow.Destination.String()},
		explain.ParamProtocol: {flow.Protocol.String()},
	}
	if flow.Device != "" {
		query.Set(explain.ParamDevice, flow.Device)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+server+explain.Path+"?"+query.Encode(), nil)
	if err != nil {
		return nil, usagef("--server %q: want an address and port, 127.0.0.1:10249", server)
	}
	// Not the default transport: what is on this node is not behind a proxy.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		var request *url.Error // its text has the whole query
		if errors.As(err, &request) {
			err = request.Err
		}
		return nil, fmt.Errorf("ask kube-proxy: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		const longest = 1 << 10
		text, _ := io.ReadAll(io.LimitReader(response.Body, longest))
		message := strings.TrimSpace(string(text))
		if response.StatusCode == http.StatusNotFound {
			message = "it does not know how to explain: it is not Tandem's, or an older one"
		}
		return nil, fmt.Errorf("kube-proxy at %s: %s", server, message)
	}
	var e explain.Explanation
	if err := json.NewDecoder(response.Body).Decode(&e); err != nil {
		return nil, fmt.Errorf("kube-proxy at %s: read the answer: %w", server, err)
	}
	return &e, nil
}

func sourceText(flow proxier.Flow) string {
	if flow.Source.Port() == 0 {
		return flow.Source.Addr().String()
	}
	return flow.Source.String()
}
