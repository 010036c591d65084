// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	servicePortTCP = 80
	nodePortTCP    = 30080
	servicePortUDP = 53
	podPortTCP     = 8080
	podPortUDP     = 5353
)

// The Service has ClusterIPs of both families, from the lab's range.
var (
	serviceIP4 = netip.MustParseAddr("10.96.0.10")
	serviceIP6 = netip.MustParseAddr("fd00:10:96::10")
)

func (c *cluster) writeService() error {
	return c.replace("service.yaml", fmt.Sprintf(`apiVersion: v1
kind: Service
metadata:
  name: hello
  namespace: demo
spec:
  type: NodePort
  ipFamilyPolicy: RequireDualStack
  clusterIPs: ["%s", "%s"]
  ports:
  - {name: http, protocol: TCP, port: %d, targetPort: %d, nodePort: %d}
  - {name: dns, protocol: UDP, port: %d, targetPort: %d}
`, serviceIP4, serviceIP6, servicePortTCP, podPortTCP, nodePortTCP, servicePortUDP, podPortUDP))
}

// writeEndpoints writes EndpointSlices of both families with the ready pods, and returns when
// the file was replaced.
func (c *cluster) writeEndpoints() (time.Time, error) {
	var text strings.Builder
	for _, family := range []string{"IPv4", "IPv6"} {
		fmt.Fprintf(&text, `---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: hello-%s
  namespace: demo
  labels: {kubernetes.io/service-name: hello}
addressType: %s
ports:
- {name: http, protocol: TCP, port: %d}
- {name: dns, protocol: UDP, port: %d}
endpoints:
`, strings.ToLower(family), family, podPortTCP, podPortUDP)
		for _, p := range c.ready {
			addr := p.Addr4
			if family == "IPv6" {
				addr = p.Addr6
			}
			fmt.Fprintf(&text, "- {addresses: [%q], nodeName: %s, conditions: {ready: true}}\n", addr, p.Node.Name)
		}
	}
	err := c.replace("endpoints.yaml", text.String())
	return time.Now(), err
}

// replace replaces a file by renaming a complete one, so that no incomplete file is read.
func (c *cluster) replace(name, text string) error {
	draft := filepath.Join(c.dir, name)
	if err := os.WriteFile(draft, []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(draft, filepath.Join(c.manifests, name))
}
