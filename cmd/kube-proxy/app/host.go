// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"k8s.io/component-base/featuregate"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/kernel/xfrm"
	"github.com/tandem-proxy/tandem/proxier"
)

// ownProc is the proc file system that knows this process. --ebpf-proc-root
// can be another's, in which processes of the host are found.
const ownProc = "/proc"

// host is what modes know before they are opened.
type host struct {
	config *config.Config
	gate   featuregate.FeatureGate
	report capabilities.Report
	// cgroup is the root of the cgroup2 hierarchy. It is empty if that was not found, for the
	// reason cgroupErr.
	cgroup    string
	cgroupErr error
	// hasIPsec says that policies of IPsec act on packets that leave this node.
	hasIPsec bool
}

// probeHost finds out what the kernel can do.
func probeHost(ctx context.Context, o *Options) (*host, error) {
	h := &host{config: o.Config, gate: o.gate}
	h.cgroup, h.cgroupErr = h.cgroupRoot()
	h.report = capabilities.Probe(ctx, capabilities.Options{CgroupRoot: h.cgroup, Mask: o.mask})
	var err error
	if h.hasIPsec, err = xfrm.Acts(); err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot find out whether this node has policies of IPsec", "reason", err.Error())
	}
	return h, ctx.Err()
}

// cgroupRoot is the configured root of the cgroup2 hierarchy, or the one that is mounted.
func (h *host) cgroupRoot() (string, error) {
	if root := h.config.Tandem.EBPF.CgroupRoot; root != "" {
		return root, nil
	}
	return capabilities.FindCgroup2Root(ownProc)
}

// families are the address families that this host supports. The file exists only with
// IPv6, which can be disabled as well.
func families() []proxier.Family {
	all := []proxier.Family{proxier.IPv4}
	off, _ := kernelSettings.Get("proc/sys/net/ipv6/conf/all/disable_ipv6")
	if _, err := os.Stat(filepath.Join(ownProc, "self/net/if_inet6")); err == nil && off != "1" {
		all = append(all, proxier.IPv6)
	}
	return all
}

// checkFamilies returns an error if the configuration needs an address family that this host
// does not support, where upstream ends as well.
func checkFamilies(c *config.Config, have []proxier.Family) error {
	k := &c.KubeProxy
	lacks := func(a netip.Addr) bool { return !slices.Contains(have, proxier.FamilyOf(a)) }
	if a, err := proxier.ParseAddr(k.BindAddress); err == nil && !a.IsUnspecified() && lacks(a) {
		return fmt.Errorf("bindAddress is %s, but this host has no %s", a, proxier.FamilyOf(a))
	}
	if k.DetectLocalMode != config.LocalModeClusterCIDR {
		return nil
	}
	pods, err := config.ParseClusterCIDR(k.ClusterCIDR)
	if err != nil {
		return err // validated before
	}
	if len(pods) > 0 && !slices.ContainsFunc(pods, func(p netip.Prefix) bool { return !lacks(p.Addr()) }) {
		return fmt.Errorf("clusterCIDR is %s, but this host has no %s", k.ClusterCIDR, proxier.FamilyOf(pods[0].Addr()))
	}
	return nil
}

// setOOMScore sets the oom_score_adj of this process.
func setOOMScore(score int32) error {
	return os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(int(score))), 0)
}
