// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// server is a Deployment whose pods answer with their names, and its Service.
const server = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: %[1]s}
spec:
  replicas: %[2]d
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      terminationGracePeriodSeconds: 1
      topologySpreadConstraints: [{maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabels: {app: %[1]s}}}]
      containers:
      - name: server
        image: ` + tools + `
        env: [{name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}, {name: ` + lab.HelperEnv + `, value: "$(POD) 8080"}]
        readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: %[1]s}
spec:
  type: NodePort
  ipFamilyPolicy: RequireDualStack
  clusterIP: 10.96.0.%[3]d
  clusterIPs: [10.96.0.%[3]d, "fd00:10:96::%[3]d"]
  selector: {app: %[1]s}
  ports:
  - {name: tcp, port: 80, targetPort: 8080, nodePort: 300%[3]d}
  - {name: udp, port: 80, targetPort: 8080, nodePort: 300%[3]d, protocol: UDP}
`

// The Services: connections are counted at one, and endpoints change of the other. Their number is the
// last one of their ClusterIPs and NodePorts.
const (
	steady   = "steady"
	changing = "changing"

	numberOfSteady   = 80
	numberOfChanging = 81
)

// pod is that of clients.
const pod = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: client}
spec:
  selector: {matchLabels: {app: client}}
  template:
    metadata: {labels: {app: client}}
    spec:
      nodeName: node1
      terminationGracePeriodSeconds: 1
      containers: [{name: client, image: "` + tools + `", env: [{name: ` + lab.HelperEnv + `, value: "client 8080"}]}]
`

// serve deploys servers and clients, and waits until all of the cluster is Ready.
func (c *cluster) serve() {
	c.tb.Helper()
	c.apply(fmt.Sprintf(server, steady, 3, numberOfSteady) + "---" + fmt.Sprintf(server, changing, 2, numberOfChanging) + "---" + pod)
	c.rollout("kube-system", "daemonset/kube-proxy", "deployment/coredns")
	c.rollout("default", "deployment/"+steady, "deployment/"+changing, "deployment/client")
}

// addresses are those of a Service, for clients in the cluster and outside.
func (c *cluster) addresses(number int) (inside, outside []string) {
	for _, n := range c.nodes {
		for _, addr := range []netip.Addr{n.Addr4, n.Addr6} {
			outside = append(outside, netip.AddrPortFrom(addr, uint16(30000+number)).String())
		}
	}
	return []string{fmt.Sprintf("10.96.0.%d:80", number), fmt.Sprintf("[fd00:10:96::%d]:80", number)}, outside
}

// follows replaces the endpoints of a Service, and waits until every client gets answers from new
// ones only.
func (c *cluster) follows() {
	c.tb.Helper()
	c.kubectl("rollout", "restart", "deployment/"+changing)
	c.rollout("default", "deployment/"+changing)
	inside, outside := c.addresses(numberOfChanging)
	lab.Await(c.tb, time.Minute, "answers from new endpoints alone", func() error {
		now := c.kubectl("get", "pods", "--selector=app="+changing, "-o=jsonpath={.items[*].metadata.name}")
		for _, p := range c.clients {
			targets := inside
			if p.where == "outside" {
				targets = outside
			}
			for _, to := range targets {
				for range 8 { // as endpoints are chosen at random
					for _, network := range []string{"tcp", "udp"} {
						if server, err := p.server(network, to); err != nil {
							return err
						} else if !strings.Contains(now, server) {
							return fmt.Errorf("%s gets an answer of %s, which is gone; there are %s", p.where, server, now)
						}
					}
				}
			}
		}
		return nil
	})
}
