// SPDX-License-Identifier: Apache-2.0

package app

import (
	"testing"

	kubeproxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/proxier"
)

func TestCheckFamilies(t *testing.T) {
	v4, both := []proxier.Family{proxier.IPv4}, []proxier.Family{proxier.IPv4, proxier.IPv6}
	for _, test := range []struct {
		have                  []proxier.Family
		bind, mode, pods, err string
	}{
		{have: v4, bind: "0.0.0.0"},
		{have: v4, bind: "::"}, // which only says where servers listen
		{have: v4, bind: "10.0.0.1", pods: "10.244.0.0/16,fd00::/48"},
		{have: v4, bind: "fd00::1", err: "bindAddress is fd00::1, but this host has no IPv6"},
		{have: both, bind: "fd00::1", pods: "10.244.0.0/16"},
		{have: v4, pods: "fd00::/48", err: "clusterCIDR is fd00::/48, but this host has no IPv6"},
		{have: v4, pods: "fd00::/48", mode: config.LocalModeNodeCIDR},
		{have: both, pods: "fd00::/48"},
	} {
		c := config.New()
		k := &c.KubeProxy
		k.BindAddress, k.ClusterCIDR = test.bind, test.pods
		if test.mode != "" {
			k.DetectLocalMode = kubeproxyv1alpha1.LocalMode(test.mode)
		}
		said := ""
		if err := checkFamilies(c, test.have); err != nil {
			said = err.Error()
		}
		if said != test.err {
			t.Errorf("%+v: error %q", test, said)
		}
	}
}
