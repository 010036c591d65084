// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubeproxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"
)

// Upstream is the KubeProxyConfiguration as upstream writes and publishes it, which
// keeps one period for all modes: in modes that upstream has, the others' sections
// say 0, which is read as their default. Mode ebpf can fall back to them, and
// keeps them.
func (c *Config) Upstream() *kubeproxyv1alpha1.KubeProxyConfiguration {
	k := c.KubeProxy.DeepCopy()
	k.PortRange = "" // which means nothing any more
	var none metav1.Duration
	switch k.Mode {
	case ModeIPVS:
		k.IPTables.SyncPeriod, k.IPTables.MinSyncPeriod = none, none
	case ModeIPTables:
		k.IPVS.SyncPeriod, k.IPVS.MinSyncPeriod = none, none
	case ModeNFTables:
		k.IPVS.SyncPeriod, k.IPVS.MinSyncPeriod = none, none
		k.IPTables.SyncPeriod, k.IPTables.MinSyncPeriod, k.IPTables.MasqueradeAll = none, none, false
		k.NodePortAddresses = c.Rules().NodePortAddresses
		return k
	default:
		return k
	}
	k.NFTables.SyncPeriod, k.NFTables.MinSyncPeriod, k.NFTables.MasqueradeAll = none, none, false
	return k
}

// Encode is a file with both documents, which Load reads.
func (c *Config) Encode() ([]byte, error) {
	first, err := yaml.Marshal(c.Upstream())
	if err != nil {
		return nil, fmt.Errorf("write %s: %w", KubeProxyKind, err)
	}
	second, err := yaml.Marshal(&c.Tandem)
	if err != nil {
		return nil, fmt.Errorf("write %s: %w", TandemKind, err)
	}
	return fmt.Appendf(first, "---\n%s", second), nil
}
