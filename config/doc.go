// SPDX-License-Identifier: Apache-2.0

// Package config reads the configuration: a KubeProxyConfiguration as
// upstream knows it, and a TandemConfiguration with what upstream does not
// have, as two YAML documents of one file. It fills in defaults and finds all
// that is wrong at once, with file, line and field.
//
// Upstream's proxy decodes only the first document of its file, so that one
// file serves both as long as the KubeProxyConfiguration comes first.
package config
