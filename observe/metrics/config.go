// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"crypto/sha256"
	"encoding/binary"

	k8smetrics "k8s.io/component-base/metrics"
)

// Results of a change of the configuration file. A change that needs a restart is not counted,
// since the counters end with the process.
const (
	ReloadApplied   = "applied"
	ReloadUnchanged = "unchanged" // the settings are the same
	ReloadFailed    = "failed"    // the file is invalid or missing
)

// configMetrics are about the file of --config.
type configMetrics struct {
	reloads *k8smetrics.CounterVec
	good    *k8smetrics.Gauge
	hash    *k8smetrics.Gauge
}

func newConfigMetrics() configMetrics {
	return configMetrics{
		reloads: k8smetrics.NewCounterVec(&k8smetrics.CounterOpts{
			Subsystem: tandem, Name: "config_reloads_total", StabilityLevel: k8smetrics.ALPHA,
			Help: "Changes of the configuration file, by result.",
		}, []string{"result"}),
		good: k8smetrics.NewGauge(&k8smetrics.GaugeOpts{
			Subsystem: tandem, Name: "config_last_reload_successful", StabilityLevel: k8smetrics.ALPHA,
			Help: "1 if the configuration file is in force, 0 if it is invalid or missing and the previous configuration is in force.",
		}),
		hash: k8smetrics.NewGauge(&k8smetrics.GaugeOpts{
			Subsystem: tandem, Name: "config_hash", StabilityLevel: k8smetrics.ALPHA,
			Help: "Hash of the configuration file in force; equal on nodes with the same file.",
		}),
	}
}

func (c *configMetrics) register(registry Registry) error {
	for _, metric := range []k8smetrics.Registerable{c.reloads, c.good, c.hash} {
		if err := registry.Register(metric); err != nil {
			return err
		}
	}
	for _, result := range []string{ReloadApplied, ReloadUnchanged, ReloadFailed} {
		c.reloads.WithLabelValues(result).Add(0)
	}
	c.good.Set(1)
	return nil
}

// ConfigFile records the contents of the file in force.
func (m *Metrics) ConfigFile(text string) {
	sum := sha256.Sum256([]byte(text))
	// A float64 represents integers of 48 bits exactly.
	m.config.hash.Set(float64(binary.BigEndian.Uint64(sum[:]) >> (64 - 48)))
}

// ConfigReloaded counts a change of the file.
func (m *Metrics) ConfigReloaded(result string) {
	m.config.reloads.WithLabelValues(result).Inc()
	if result == ReloadFailed {
		m.config.good.Set(0)
	} else {
		m.config.good.Set(1)
	}
}
