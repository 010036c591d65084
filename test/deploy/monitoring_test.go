// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/relabel"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8slabels "k8s.io/apimachinery/pkg/labels"
	k8smetrics "k8s.io/component-base/metrics"
	"sigs.k8s.io/yaml"

	"github.com/tandem-proxy/tandem/observe/metrics"
	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
	"github.com/tandem-proxy/tandem/test/golden"
)

const (
	alertsFile    = chart + "/files/alerts.yaml"
	dashboardFile = chart + "/files/dashboard.json"
)

// tables are the values of the label map.
var tables = []string{"affinity", "backends", "flows", "frontends", "locals", "opt_outs", "ranges", "services", "slots", "tcp_flows", "udp_flows", "udp_peers"}

// elsewhere are metrics that every Go process has.
var elsewhere = map[string]bool{"process_cpu_seconds_total": true, "process_resident_memory_bytes": true}

// scraped are labels that a scrape adds; node is of the PodMonitor.
var scraped = []string{"instance", "job", "le", "node"}

// exposed are the labels of all metrics of this proxy, by the names of the series.
func exposed(t *testing.T) map[string][]string {
	t.Helper()
	m, registry := metrics.New([]proxier.Family{proxier.IPv4, proxier.IPv6}), k8smetrics.NewKubeRegistry()
	if err := m.Register(registry, func() (metrics.Tables, bool) {
		return metrics.Tables{
			Direct: 2, DirectReady: 1, ByName: map[string]metrics.Table{"frontends": {Used: 1, Max: 2}}, Packets: map[string]uint64{"forwarded_local": 1},
			Services: []metrics.Service{{Namespace: "shop", Name: "web", Node: proxier.Outcomes{Connections: 1}, Signals: &metrics.Signals{Established: 1}}},
		}, true
	}, func() (metrics.RulePackets, bool) { return metrics.RulePackets{}, true }, func() map[string]time.Time { return map[string]time.Time{"services": time.Now()} }); err != nil {
		t.Fatal(err)
	}
	// Metrics with labels appear only after their first count.
	m.Healthz(200)
	m.Livez(200)
	m.Readyz(503)
	m.Checks(map[string]bool{"programmed": true})
	m.Draining("programs of mode ebpf", time.Now())
	m.Problem("Service", "Conflict")
	m.Mode("ebpf", metrics.ModeRequested)
	m.Capability("connect4", "yes")
	m.Build("v1")
	m.Rules(proxier.IPv4, "nat", 1, 1)
	m.Start(time.Now())
	m.Synced(proxier.SyncInfo{Full: true, Triggers: [proxier.Families][]time.Time{{time.Now()}}})
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]string{}
	for _, f := range families {
		var names []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			names = append(names, l.GetName())
		}
		all[f.GetName()] = names
		if f.GetMetric()[0].GetHistogram() != nil {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				all[f.GetName()+suffix] = names
			}
		}
	}
	return all
}

// resultsOf are the values of the label result of a metric.
func resultsOf(metric string) []string {
	if strings.HasPrefix(metric, "tandem_service_") {
		return []string{"established", "refused", "unanswered"}
	}
	return lbmap.ReasonNames[:]
}

// parseQuery parses a query of an alert or the dashboard, with examples for variables of the latter.
func parseQuery(query string) (parser.Expr, error) {
	return parser.NewParser(parser.Options{}).ParseExpr(strings.NewReplacer("$__rate_interval", "5m", "$instance", ".+").Replace(query))
}

// checkQuery parses a query and checks its metrics, their labels, and the values of this
// proxy's labels.
func checkQuery(t *testing.T, what, query string, series map[string][]string) {
	t.Helper()
	expression, err := parseQuery(query)
	if err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	var known []string // labels of the metrics in it
	parser.Inspect(expression, func(n parser.Node, _ []parser.Node) error {
		selector, ok := n.(*parser.VectorSelector)
		if !ok || elsewhere[selector.Name] {
			return nil
		}
		has, there := series[selector.Name]
		if !there {
			t.Errorf("%s: there is no metric %s", what, selector.Name)
		}
		known = append(known, has...)
		for _, m := range selector.LabelMatchers {
			if m.Name != labels.MetricName && !slices.Contains(slices.Concat(has, scraped), m.Name) {
				t.Errorf("%s: %s has no label %s", what, selector.Name, m.Name)
			}
			if results := resultsOf(selector.Name); m.Name == "result" && !slices.ContainsFunc(results, m.Matches) {
				t.Errorf("%s: no result matches %s", what, m)
			}
			if m.Name == "map" && !slices.ContainsFunc(tables, m.Matches) {
				t.Errorf("%s: there is no map %s", what, m)
			}
		}
		return nil
	})
	parser.Inspect(expression, func(n parser.Node, _ []parser.Node) error {
		if a, ok := n.(*parser.AggregateExpr); ok {
			for _, name := range a.Grouping {
				if !slices.Contains(slices.Concat(known, scraped), name) {
					t.Errorf("%s: no metric in it has the label %s", what, name)
				}
			}
		}
		return nil
	})
}

func TestAlerts(t *testing.T) {
	series := exposed(t)
	groups, errs := rulefmt.ParseFile(alertsFile, false, model.UTF8Validation, parser.NewParser(parser.Options{}), slog.Default())
	for _, err := range errs {
		t.Error(err)
	}
	if groups == nil {
		return
	}
	names := map[string]bool{}
	covered := map[string]bool{} // maps of which an alert watches the entries
	for _, g := range groups.Groups {
		for _, r := range g.Rules {
			if r.Alert == "" || names[r.Alert] || r.Labels["severity"] == "" || r.Annotations["summary"] == "" {
				t.Errorf("rule %q: no alert, a second one of the name, or without severity or summary", r.Alert)
			}
			names[r.Alert] = true
			checkQuery(t, r.Alert, r.Expr, series)
			for _, name := range tables {
				covered[name] = covered[name] || watchesEntries(r.Expr, name)
			}
		}
	}
	for _, name := range tables {
		if !covered[name] {
			t.Errorf("no alert says that map %s is full", name)
		}
	}
}

// watchesEntries reports whether a query has the entries of a map.
func watchesEntries(query, table string) (has bool) {
	expression, err := parseQuery(query)
	if err != nil {
		return false
	}
	parser.Inspect(expression, func(n parser.Node, _ []parser.Node) error {
		if s, ok := n.(*parser.VectorSelector); ok && s.Name == "tandem_map_entries" {
			has = has || !slices.ContainsFunc(s.LabelMatchers, func(m *labels.Matcher) bool { return m.Name == "map" && !m.Matches(table) })
		}
		return nil
	})
	return has
}

func TestDashboard(t *testing.T) {
	series := exposed(t)
	text, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	type grid struct{ X, Y, W, H int }
	var d struct {
		UID, Title string
		Templating struct {
			List []struct{ Name, Type string }
		}
		Panels []struct {
			ID          int
			Type, Title string
			Datasource  struct{ UID string }
			GridPos     grid
			Targets     []struct{ Expr, LegendFormat, RefID string }
		}
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	var variables []string
	for _, v := range d.Templating.List {
		variables = append(variables, v.Name)
	}
	if want := []string{"datasource", "instance"}; d.UID == "" || d.Title == "" || !cmp.Equal(variables, want) {
		t.Errorf("uid %q, title %q, variables %q, want %q", d.UID, d.Title, variables, want)
	}
	ids, cells, shown := map[int]bool{}, map[[2]int]string{}, map[string]bool{}
	for _, p := range d.Panels {
		if ids[p.ID] || p.Title == "" {
			t.Errorf("panel %d: there are two, or it has no title", p.ID)
		}
		ids[p.ID] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other, taken := cells[[2]int{x, y}]; taken || x >= 24 {
					t.Fatalf("panel %q lies over %q, or outside", p.Title, other)
				}
				cells[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.Datasource.UID != "${datasource}" || len(p.Targets) == 0 {
			t.Errorf("panel %q asks %q %d things", p.Title, p.Datasource.UID, len(p.Targets))
		}
		for _, target := range p.Targets {
			checkQuery(t, p.Title, target.Expr, series)
			for name := range checkLegend(t, p.Title, target.Expr, target.LegendFormat, series) {
				shown[name] = true
			}
		}
	}
	for name := range series {
		if strings.HasPrefix(name, "tandem_service_") && strings.HasSuffix(name, "bytes_total") && !shown[name] {
			t.Errorf("no panel shows %s", name)
		}
	}
}

// variable is a label in the format of a legend.
var variable = regexp.MustCompile(`{{(\w+)}}`)

// checkLegend checks that the result of a query has the labels of its legend, and that the legend tells kinds of clients apart where the
// metric does. It returns the metrics.
func checkLegend(t *testing.T, what, query, legend string, series map[string][]string) map[string]bool {
	t.Helper()
	expression, err := parseQuery(query)
	if err != nil {
		return nil // checkQuery has said so
	}
	metrics, grouped := map[string]bool{}, false
	var has []string
	parser.Inspect(expression, func(n parser.Node, _ []parser.Node) error {
		switch n := n.(type) {
		case *parser.AggregateExpr:
			if n.Op != parser.TOPK && !grouped { // topk keeps all labels
				has, grouped = n.Grouping, true
			}
		case *parser.VectorSelector:
			metrics[n.Name] = true
			if !grouped {
				has = slices.Concat(has, series[n.Name], scraped)
			}
			if slices.Contains(series[n.Name], "client") && !strings.Contains(legend, "{{client}}") {
				t.Errorf("%s: %s is of two kinds of clients, which legend %q does not tell apart", what, n.Name, legend)
			}
		}
		return nil
	})
	for _, v := range variable.FindAllStringSubmatch(legend, -1) {
		if !slices.Contains(has, v[1]) {
			t.Errorf("%s: legend %q has label %s; the query has %q", what, legend, v[1], has)
		}
	}
	return metrics
}

// With the operator of Prometheus, the chart has the same alerts.
func TestMonitoringObjects(t *testing.T) {
	with := map[string]any{"metricsBindAddress": "0.0.0.0:10249"}
	for _, name := range []string{"podMonitor", "prometheusRule", "dashboard"} {
		with[name] = map[string]any{"enabled": true, "labels": map[string]any{"release": "prometheus"}}
	}
	text := mustRender(t, with)
	alerts, err := os.ReadFile(filepath.FromSlash(alertsFile))
	if err != nil {
		t.Fatal(err)
	}
	dashboard, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	// All but the two files, which the objects have as they are.
	files, err := renderFiles(required(with))
	if err != nil {
		t.Fatal(err)
	}
	rest := files["tandem-kube-proxy/templates/monitoring.yaml"]
	for file, rendered := range map[string]string{"alerts.yaml": indented(2, alerts), "dashboard.json": indented(4, dashboard)} {
		if !strings.Contains(rest, rendered) {
			t.Errorf("no object has %s", file)
		}
		rest = strings.ReplaceAll(rest, rendered, "\n<"+file+">\n")
	}
	golden.Compare(t, "monitoring.golden", rest)
	var want monitoringv1.PrometheusRuleSpec
	if err := yaml.UnmarshalStrict(alerts, &want); err != nil {
		t.Fatal(err)
	}
	objects := decode(t, text)
	rule, pods := find[*monitoringv1.PrometheusRule](t, objects), find[*monitoringv1.PodMonitor](t, objects)
	for _, o := range []metav1.Object{rule, pods} {
		if o.GetLabels()["release"] != "prometheus" {
			t.Errorf("%T lacks the label that its operator selects by", o)
		}
	}
	if d := cmp.Diff(want, rule.Spec); d != "" {
		t.Errorf("rules of the operator (-file +object):\n%s", d)
	}
	checkPodMonitor(t, &pods.Spec, &find[*appsv1.DaemonSet](t, objects).Spec.Template)
	var shown *v1.ConfigMap
	for _, o := range objects {
		if m, ok := o.(*v1.ConfigMap); ok && m.Data["tandem.json"] != "" {
			shown = m
		}
	}
	if shown == nil || shown.Data["tandem.json"] != string(dashboard) {
		t.Error("the dashboard in the ConfigMap is another one")
	}
}

// indented is what nindent of a template makes of a file.
func indented(spaces int, file []byte) string {
	prefix := "\n" + strings.Repeat(" ", spaces)
	return prefix + strings.ReplaceAll(string(file), "\n", prefix)
}

// checkPodMonitor checks that it selects the pods and a port that they have, and adds labels that queries know.
func checkPodMonitor(t *testing.T, m *monitoringv1.PodMonitorSpec, pods *v1.PodTemplateSpec) {
	t.Helper()
	selector, err := metav1.LabelSelectorAsSelector(&m.Selector)
	if err != nil || selector.Empty() || !selector.Matches(k8slabels.Set(pods.Labels)) {
		t.Errorf("the PodMonitor selects %v, %v; pods have %v", selector, err, pods.Labels)
	}
	if len(m.PodMetricsEndpoints) != 1 {
		t.Fatalf("%d endpoints", len(m.PodMetricsEndpoints))
	}
	e := m.PodMetricsEndpoints[0]
	if e.Path != "/metrics" || e.Port == nil || !slices.ContainsFunc(pods.Spec.Containers[0].Ports, func(p v1.ContainerPort) bool { return p.Name == *e.Port }) {
		t.Errorf("it scrapes %+v; there are %v", e, pods.Spec.Containers[0].Ports)
	}
	var targets []string
	for _, r := range e.RelabelConfigs {
		if r.Action != string(relabel.Replace) || !slices.Equal(r.SourceLabels, []monitoringv1.LabelName{"__meta_kubernetes_pod_node_name"}) || !slices.Contains(scraped, r.TargetLabel) {
			t.Errorf("relabelling %+v", r)
		}
		targets = append(targets, r.TargetLabel)
	}
	if !slices.Contains(targets, "instance") {
		t.Error("series change their instance whenever a pod is replaced")
	}
}
