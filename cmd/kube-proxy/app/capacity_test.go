// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"
	"context"
	"fmt"
	"testing"

	diff "github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/proxier"
)

// TestCapacity: a forecast says of each frontend what a process would do with maps that are too small.
func TestCapacity(t *testing.T) {
	px, err := proxier.New(proxier.Options{NodeName: "node1", Tier: elsewhere{}, Runner: proxier.DefaultRunnerOptions()})
	if err != nil {
		t.Fatal(err)
	}
	for i, service := range []string{"one", "two", "opted-out", "sctp", "three"} {
		ip := fmt.Sprintf("10.96.0.%d", i+1)
		s := &v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: service},
			Spec:       v1.ServiceSpec{ClusterIP: ip, ClusterIPs: []string{ip}, ExternalIPs: []string{fmt.Sprintf("192.0.2.%d", i+1)}, Ports: []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}}},
		}
		switch service {
		case "opted-out":
			s.Annotations = map[string]string{proxier.AnnotationFastPath: proxier.FastPathDisabled}
		case "sctp":
			s.Spec.Ports[0].Protocol = v1.ProtocolSCTP
		}
		px.OnServiceAdd(s)
	}
	px.OnServiceSynced()
	px.OnEndpointSlicesSynced()
	if err := px.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
	const left = "left to the other kube-proxy: the kind is not among coexistence.frontends"
	const optedOut, sctp = "the Service opts out: tandem-proxy.dev/fast-path=disabled", "the eBPF datapath does not support SCTP"
	for _, test := range []struct {
		name   string
		change func(*config.TandemConfiguration)
		want   []string
	}{
		{"all fit", func(*config.TandemConfiguration) {}, []string{
			"one ClusterIP ebpf", "one ExternalIP ebpf", "two ClusterIP ebpf", "two ExternalIP ebpf",
			"opted-out ClusterIP iptables: " + optedOut, "opted-out ExternalIP iptables: " + optedOut,
			"sctp ClusterIP iptables: " + sctp, "sctp ExternalIP iptables: " + sctp, "three ClusterIP ebpf", "three ExternalIP ebpf",
		}},
		{"few frontends", func(c *config.TandemConfiguration) { c.EBPF.MaxFrontends = 4 }, []string{
			"one ClusterIP ebpf", "one ExternalIP ebpf", "two ClusterIP ebpf", "two ExternalIP ebpf",
			"opted-out ClusterIP iptables: " + optedOut, "opted-out ExternalIP iptables: " + optedOut,
			"sctp ClusterIP iptables: " + sctp, "sctp ExternalIP iptables: " + sctp, "three ClusterIP iptables: frontends full", "three ExternalIP iptables: frontends full",
		}},
		{"few services", func(c *config.TandemConfiguration) {
			c.EBPF.MaxServices, c.EBPF.Fallback = 3, []string{config.FallbackNone}
		}, []string{
			"one ClusterIP ebpf", "one ExternalIP ebpf", "two ClusterIP ebpf", "two ExternalIP ebpf",
			"opted-out ClusterIP -: services full", "opted-out ExternalIP -: services full",
			"sctp ClusterIP -: " + sctp, "sctp ExternalIP -: " + sctp, "three ClusterIP -: services full", "three ExternalIP -: services full",
		}},
		{"few frontends, of which the other kube-proxy serves a kind", func(c *config.TandemConfiguration) {
			c.EBPF.MaxFrontends, c.Coexistence.Frontends = 2, []string{"ClusterIP"}
		}, []string{
			"one ClusterIP ebpf", "one ExternalIP foreign: " + left, "two ClusterIP ebpf", "two ExternalIP foreign: " + left,
			"opted-out ClusterIP foreign: " + optedOut, "opted-out ExternalIP foreign: " + left,
			"sctp ClusterIP foreign: " + sctp, "sctp ExternalIP foreign: " + left, "three ClusterIP foreign: frontends full", "three ExternalIP foreign: " + left,
		}},
	} {
		c := config.New()
		c.KubeProxy.Mode = config.ModeEBPF
		test.change(&c.Tandem)
		report := capabilities.Report{Results: []capabilities.Result{{Feature: capabilities.IPTables, State: capabilities.Yes}}}
		serves := (&ebpfMode{&host{config: c, report: report}}).forecast(px.Table()).serves
		var got []string
		for _, change := range px.Table().All() {
			d := change.New
			for i := range d.Frontends {
				s := serves(d, &d.Frontends[i], proxier.FromHost)
				text := fmt.Sprintf("%s %s %s", d.Name.Name, d.Frontends[i].Kind, cmp.Or(s.by, "-"))
				if s.refused != nil {
					text += ": " + s.refused.Error()
				}
				got = append(got, text)
			}
		}
		if d := diff.Diff(test.want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, d)
		}
	}
}
