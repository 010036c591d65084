// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/test/kubeadm"
)

func TestDifferences(t *testing.T) {
	const tandem = "---\napiVersion: config.tandem-proxy.dev/v1alpha1\nkind: TandemConfiguration\n"
	mustParse := func(text string) *Config {
		t.Helper()
		c, _, err := parse("config.yaml", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	for _, test := range []struct {
		name          string
		before, after string // to add to the document of kubeadm
		want          []string
	}{
		{name: "nothing"},
		{name: "a comment", after: "# nothing to see\n"},
		{name: "a default that is spelled out", after: tandem + "ebpf: {syncPeriod: 30s}\n"},
		{
			name: "fields of both documents", before: tandem + "strictSourceRanges: true\n", after: tandem + "ebpf: {maxSlots: 5000, devices: [eth0]}\n",
			want: []string{
				`TandemConfiguration.ebpf.devices from unset to ["eth0"]`, fmt.Sprintf("TandemConfiguration.ebpf.maxSlots from %d to 5000", New().Tandem.EBPF.MaxSlots),
				"TandemConfiguration.strictSourceRanges from true to unset",
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			list, err := Differences(mustParse(kubeadmDocument+test.before), mustParse(kubeadmDocument+test.after))
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, d := range list {
				got = append(got, d.String())
			}
			if d := cmp.Diff(test.want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}

	before, after := mustParse(kubeadmDocument), mustParse(strings.NewReplacer(
		"verbosity: 0", "verbosity: 3", "mode: ebpf", "mode: iptables", "clusterCIDR: "+kubeadm.PodSubnet, "clusterCIDR: \"\"", "hostnameOverride: \"\"", "featureGates: {AllAlpha: true}",
	).Replace(kubeadmDocument))
	list, err := Differences(before, after)
	if got, want := fmt.Sprint(list), `[clusterCIDR from "10.244.0.0/16,fd00:10:244::/48" to "" featureGates.AllAlpha from unset to true logging.verbosity from 0 to 3 mode from "ebpf" to "iptables"]`; err != nil || got != want {
		t.Errorf("got %s, error %v, want %s", got, err, want)
	}
}
