// SPDX-License-Identifier: Apache-2.0

package config

import (
	_ "embed"
	"errors"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
	metricsfeatures "k8s.io/component-base/metrics/features"
	componentversion "k8s.io/component-base/version"
	zpagesfeatures "k8s.io/component-base/zpages/features"
)

// Gates that mean something here, besides those of the libraries.
const (
	// AllowServiceExternalIPs has external IPs served.
	AllowServiceExternalIPs featuregate.Feature = "AllowServiceExternalIPs"
	// IPVSMode has mode ipvs.
	IPVSMode featuregate.Feature = "KubeProxyIPVS"
)

// upstreamGates are those of upstream's proxy, which links the gates of all of
// Kubernetes: a cluster that gives its components one list of gates gives it to
// the proxy as well. Gates of older minor versions are among them.
//
//go:embed gates.txt
var upstreamGates string

// stageRemoved stands in place of the stage of a gate that this version does not have.
const stageRemoved = "REMOVED"

// DropRemovedGates separates the gates that only older minor versions have. They can have no
// effect here; there is a warning for each.
func DropRemovedGates(wanted map[string]bool) (rest map[string]bool, warnings map[string]string) {
	last := map[string]string{}
	for line := range strings.Lines(upstreamGates) {
		if words := strings.Fields(line); len(words) == 3 && words[1] == stageRemoved {
			last[words[0]] = words[2]
		}
	}
	rest, warnings = map[string]bool{}, map[string]string{}
	for name, on := range wanted {
		if version, removed := last[name]; removed {
			warnings[name] = fmt.Sprintf("feature gate %s has no effect: Kubernetes %s was the last version that had it", name, version)
		} else {
			rest[name] = on
		}
	}
	return rest, warnings
}

// NewFeatureGate knows the gates that a configuration may set.
func NewFeatureGate() (featuregate.MutableVersionedFeatureGate, error) {
	gate := featuregate.NewVersionedFeatureGate(version.MustParse(componentversion.DefaultKubeBinaryVersion))
	if err := errors.Join(
		logsapi.AddFeatureGates(gate),
		metricsfeatures.AddFeatureGates(gate),
		zpagesfeatures.AddFeatureGates(gate),
	); err != nil {
		return nil, err
	}
	of, known := map[featuregate.Feature]featuregate.VersionedSpecs{}, gate.GetAll()
	needs := map[featuregate.Feature][]featuregate.Feature{}
	for line := range strings.Lines(upstreamGates) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		words := strings.Fields(line)
		if len(words) < 3 {
			return nil, fmt.Errorf("table of feature gates: %q", line)
		}
		if words[1] == stageRemoved {
			continue
		}
		name, spec := featuregate.Feature(words[0]), featuregate.FeatureSpec{Version: version.MajorMinor(1, 0), Default: words[2] == "true"}
		switch words[1] {
		case "ALPHA":
			spec.PreRelease = featuregate.Alpha
		case "BETA":
			spec.PreRelease = featuregate.Beta
		case "DEPRECATED":
			spec.PreRelease = featuregate.Deprecated
		}
		words = words[3:]
		if len(words) > 0 && words[0] == "locked" {
			spec.LockToDefault, words = true, words[1:]
		}
		if _, library := known[name]; !library {
			of[name] = featuregate.VersionedSpecs{spec}
		}
		for _, other := range words {
			needs[name] = append(needs[name], featuregate.Feature(other))
		}
	}
	return gate, errors.Join(gate.AddVersioned(of), gate.AddDependencies(needs))
}
