// SPDX-License-Identifier: Apache-2.0

package scenarios

import (
	"fmt"
	"net/netip"
	"reflect"
	"strconv"
	"strings"

	"github.com/tandem-proxy/tandem/proxier"
)

// Config is what all proxies of a scenario have in common.
type Config struct {
	Detect                  Detect
	ServiceCIDRs            []netip.Prefix // empty: not known
	NodePortAddresses       []string       // as in kube-proxy's configuration
	LocalhostNodePorts      bool
	MasqueradeAll           bool
	AllowServiceExternalIPs bool
	StrictSourceRanges      bool
}

// Detect is how the proxy detects local pods.
type Detect struct {
	Mode      string // of kube-proxy's detectLocalMode, or none
	CIDRs     []netip.Prefix
	Interface string
}

// The modes of Detect.
const (
	DetectNone                = "none"
	DetectClusterCIDR         = "ClusterCIDR"
	DetectNodeCIDR            = "NodeCIDR"
	DetectBridgeInterface     = "BridgeInterface"
	DetectInterfaceNamePrefix = "InterfaceNamePrefix"
)

// DefaultConfig is the configuration of scenarios without config commands.
func DefaultConfig() Config {
	return Config{
		Detect:                  Detect{Mode: DetectClusterCIDR, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")}},
		ServiceCIDRs:            []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")},
		AllowServiceExternalIPs: true,
	}
}

// Set changes one setting.
func (c *Config) Set(s Setting) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("config: %s=%s: %w", s.Key, s.Value, err)
		}
	}()
	set := func(to *bool) error {
		b, err := strconv.ParseBool(s.Value)
		if err != nil || s.Value != strconv.FormatBool(b) {
			return fmt.Errorf("want true or false")
		}
		*to = b
		return nil
	}
	switch s.Key {
	case "detectLocal":
		c.Detect, err = parseDetect(s.Value)
		return err
	case "serviceCIDRs":
		c.ServiceCIDRs, err = parsePrefixes(s.Value)
		return err
	case "nodePortAddresses":
		list := strings.Split(s.Value, ",")
		if s.Value == "default" {
			list = nil
		}
		if _, _, err := proxier.ParseNodePortSelector(list, false); err != nil {
			return err
		}
		c.NodePortAddresses = list
		return nil
	case "localhostNodePorts":
		return set(&c.LocalhostNodePorts)
	case "masqueradeAll":
		return set(&c.MasqueradeAll)
	case "allowServiceExternalIPs":
		return set(&c.AllowServiceExternalIPs)
	case "strictSourceRanges":
		return set(&c.StrictSourceRanges)
	}
	return fmt.Errorf("unknown setting")
}

func parsePrefixes(text string) (list []netip.Prefix, err error) {
	if text == "none" {
		return nil, nil
	}
	for word := range strings.SplitSeq(text, ",") {
		p, err := netip.ParsePrefix(word)
		if err != nil {
			return nil, err
		}
		list = append(list, p)
	}
	return list, nil
}

func parseDetect(text string) (d Detect, err error) {
	mode, arg, has := strings.Cut(text, ":")
	d.Mode = mode
	switch mode {
	case DetectNone, DetectNodeCIDR:
		if has {
			err = fmt.Errorf("%s takes no value", mode)
		}
	case DetectClusterCIDR:
		d.CIDRs, err = parsePrefixes(arg)
	case DetectBridgeInterface, DetectInterfaceNamePrefix:
		if d.Interface = arg; arg == "" {
			err = fmt.Errorf("%s needs a device", mode)
		}
	default:
		err = fmt.Errorf("unknown mode %s", mode)
	}
	return d, err
}

func (d *Detect) String() string {
	switch d.Mode {
	case DetectClusterCIDR:
		return d.Mode + ":" + joinPrefixes(d.CIDRs)
	case DetectBridgeInterface, DetectInterfaceNamePrefix:
		return d.Mode + ":" + d.Interface
	}
	return d.Mode
}

// Settings returns the settings that differ from the default.
func (c *Config) Settings() (list []Setting) {
	was := DefaultConfig()
	add := func(differs bool, key, value string) {
		if differs {
			list = append(list, Setting{key, value})
		}
	}
	add(!reflect.DeepEqual(c.Detect, was.Detect), "detectLocal", c.Detect.String())
	cidrs := "none"
	if len(c.ServiceCIDRs) > 0 {
		cidrs = joinPrefixes(c.ServiceCIDRs)
	}
	add(!reflect.DeepEqual(c.ServiceCIDRs, was.ServiceCIDRs), "serviceCIDRs", cidrs)
	add(len(c.NodePortAddresses) > 0, "nodePortAddresses", strings.Join(c.NodePortAddresses, ","))
	add(c.LocalhostNodePorts, "localhostNodePorts", "true")
	add(c.MasqueradeAll, "masqueradeAll", "true")
	add(!c.AllowServiceExternalIPs, "allowServiceExternalIPs", "false")
	add(c.StrictSourceRanges, "strictSourceRanges", "true")
	return list
}

// SameProcess reports whether running proxies learn the difference to another
// configuration, as it is not about their options.
func (c Config) SameProcess(o Config) bool {
	c.ServiceCIDRs, o.ServiceCIDRs = nil, nil
	return reflect.DeepEqual(c, o)
}

// Policy returns the policy of decision tables.
func (c *Config) Policy() (proxier.Policy, error) {
	s, _, err := proxier.ParseNodePortSelector(c.NodePortAddresses, c.LocalhostNodePorts)
	return proxier.Policy{
		MasqueradeAll: c.MasqueradeAll, NodePorts: s,
		IgnoreExternalIPs: !c.AllowServiceExternalIPs, StrictSourceRanges: c.StrictSourceRanges,
	}, err
}
