// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/component-base/configz"
	k8smetrics "k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/observe/events"
	"github.com/tandem-proxy/tandem/observe/metrics"
	"github.com/tandem-proxy/tandem/sources/apiserver"
)

// component names this process in Events, as upstream's does.
const component = "kube-proxy"

// connect builds the client of the API server and the recorder of Events.
func (p *proxy) connect() error {
	client, err := newClient(p.opts)
	if err != nil {
		return err
	}
	p.client = client
	p.recorder = events.NewWriter(component, client.Events())
	return nil
}

// newClient makes no connection.
func newClient(o *Options) (*apiserver.Client, error) {
	c := &o.Config.KubeProxy.ClientConnection
	return apiserver.NewClient(apiserver.ClientConfig{
		Kubeconfig: c.Kubeconfig, Master: o.Master,
		ContentType: c.ContentType, AcceptContentTypes: c.AcceptContentTypes,
		QPS: c.QPS, Burst: int(c.Burst),
	})
}

// recordStart records Events on the Node: the start, and a fallback to another mode, of which the log warns as well.
func (p *proxy) recordStart() {
	if p.isFallback() {
		klog.Warningf("Mode %s runs instead of %s: %s", p.mode.name(), p.opts.Config.KubeProxy.Mode, strings.Join(texts(p.decision.Reasons), "; "))
	}
	if p.recorder == nil {
		return
	}
	node := events.NodeReference(p.opts.nodeName)
	p.recorder.Eventf(node, v1.EventTypeNormal, "Starting", "StartKubeProxy", "")
	if p.isFallback() {
		p.recorder.Eventf(node, v1.EventTypeWarning, "ProxyModeFallback", "StartKubeProxy",
			"mode %s runs instead of %s: %s", p.mode.name(), p.opts.Config.KubeProxy.Mode, strings.Join(texts(p.decision.Reasons), "; "))
	}
}

// isFallback says that another mode runs than was configured.
func (p *proxy) isFallback() bool {
	return string(p.mode.name()) != string(p.opts.Config.KubeProxy.Mode)
}

func (p *proxy) registerMetrics() error {
	if p.opts.Config.KubeProxy.ShowHiddenMetricsForVersion != "" {
		k8smetrics.SetShowHidden()
	}
	var events metrics.EventSource
	if p.client != nil {
		events = p.client.LastEvents
	}
	if err := p.metrics.Register(registry{}, p.tables, p.rulePackets, events); err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	p.opts.gate.AddMetrics()
	p.metrics.Build(buildVersion())
	return nil
}

// publishMode has metrics show the mode, and what the kernel can do.
func (p *proxy) publishMode() {
	reason := metrics.ModeRequested
	if p.isFallback() {
		reason = metrics.ModeFallback
	}
	p.metrics.Mode(string(p.mode.name()), reason)
	for _, r := range p.host.report.Results {
		p.metrics.Capability(string(r.Feature), r.State.String())
	}
}

// registry is the one of the process.
type registry struct{}

func (registry) Register(m k8smetrics.Registerable) error { return legacyregistry.Register(m) }
func (registry) CustomRegister(c k8smetrics.StableCollector) error {
	return legacyregistry.CustomRegister(c)
}

// publishConfig shows the configuration at /configz.
func publishConfig(c *config.Config) (*configz.Config, error) {
	entry, err := configz.New("kubeproxy.config.k8s.io")
	if err != nil {
		return nil, fmt.Errorf("publish configuration: %w", err)
	}
	return entry, show(entry, c)
}

func show(entry *configz.Config, c *config.Config) error { return entry.Set(c.Upstream()) }
