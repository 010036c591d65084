// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"

	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
	metricsfeatures "k8s.io/component-base/metrics/features"
	componentversion "k8s.io/component-base/version"
	zpagesfeatures "k8s.io/component-base/zpages/features"
)

// AllowServiceExternalIPs has external IPs served.
const AllowServiceExternalIPs featuregate.Feature = "AllowServiceExternalIPs"

// upstreamGates are gates of upstream's proxy. But for AllowServiceExternalIPs
// they mean nothing here and may be set, since one configuration serves both.
var upstreamGates = map[featuregate.Feature]featuregate.VersionedSpecs{
	AllowServiceExternalIPs:               since("1.36", featuregate.FeatureSpec{Default: true, PreRelease: featuregate.Beta}),
	"KubeProxyIPVS":                       since("1.37", featuregate.FeatureSpec{Default: true, PreRelease: featuregate.Beta}),
	"KubeProxyNFTablesLocalhostNodePorts": since("1.37", featuregate.FeatureSpec{PreRelease: featuregate.Alpha}),
	"MultiCIDRServiceAllocator":           since("1.34", featuregate.FeatureSpec{Default: true, LockToDefault: true, PreRelease: featuregate.GA}),
	"NFTablesProxyMode":                   since("1.33", featuregate.FeatureSpec{Default: true, LockToDefault: true, PreRelease: featuregate.GA}),
	"PreferSameTrafficDistribution":       since("1.35", featuregate.FeatureSpec{Default: true, LockToDefault: true, PreRelease: featuregate.GA}),
	"WinDSR":                              since("1.34", featuregate.FeatureSpec{Default: true, PreRelease: featuregate.GA}),
	"WinOverlay":                          since("1.34", featuregate.FeatureSpec{Default: true, PreRelease: featuregate.GA}),
}

func since(minor string, spec featuregate.FeatureSpec) featuregate.VersionedSpecs {
	spec.Version = version.MustParse(minor)
	return featuregate.VersionedSpecs{spec}
}

// NewFeatureGate knows the gates that a configuration may set.
func NewFeatureGate() (featuregate.MutableVersionedFeatureGate, error) {
	gate := featuregate.NewVersionedFeatureGate(version.MustParse(componentversion.DefaultKubeBinaryVersion))
	return gate, errors.Join(
		gate.AddVersioned(upstreamGates),
		logsapi.AddFeatureGates(gate),
		metricsfeatures.AddFeatureGates(gate),
		zpagesfeatures.AddFeatureGates(gate),
	)
}
