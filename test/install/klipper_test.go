// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/test/lab"
)

// svclb is what the ServiceLB controller of K3s makes for a Service of one port for each protocol, with --servicelb-image: no command and no
// arguments, sysctls of the pod's network namespace that kubelet has to allow, and no volume for locks. %[1]s is a suffix of its name, %[2]d
// the port of the nodes, %[3]d that of DEST_IPS, and %[4]s is where DEST_IPS comes from.
const svclb = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: svclb, namespace: kube-system}
---
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: svclb-%[1]s
  namespace: kube-system
  labels: {svccontroller.k3s.cattle.io/nodeselector: "false", svccontroller.k3s.cattle.io/svcname: %[1]s, svccontroller.k3s.cattle.io/svcnamespace: default}
spec:
  selector: {matchLabels: {app: svclb-%[1]s}}
  updateStrategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 1}}
  template:
    metadata: {labels: {app: svclb-%[1]s, svccontroller.k3s.cattle.io/svcname: %[1]s, svccontroller.k3s.cattle.io/svcnamespace: default}}
    spec:
      priorityClassName: system-node-critical
      serviceAccountName: svclb
      automountServiceAccountToken: false
      securityContext: {sysctls: [{name: net.ipv4.ip_forward, value: "1"}, {name: net.ipv6.conf.all.forwarding, value: "1"}]}
      tolerations: [{key: node-role.kubernetes.io/control-plane, operator: Exists, effect: NoSchedule}, {key: CriticalAddonsOnly, operator: Exists}]
      containers:
      - &container
        name: lb-tcp-%[2]d
        image: ` + ours + `
        imagePullPolicy: IfNotPresent
        ports: [{name: lb-tcp-%[2]d, containerPort: %[2]d, hostPort: %[2]d, protocol: TCP}]
        env:
        - {name: SRC_PORT, value: "%[2]d"}
        - {name: SRC_RANGES, value: "0.0.0.0/0,::/0"}
        - {name: DEST_PROTO, value: TCP}
        - {name: DEST_PORT, value: "%[3]d"}
        - {name: DEST_IPS, %[4]s}
        securityContext: {capabilities: {add: [NET_ADMIN]}}
      - <<: *container
        name: lb-udp-%[2]d
        ports: [{name: lb-udp-%[2]d, containerPort: %[2]d, hostPort: %[2]d, protocol: UDP}]
        env:
        - {name: SRC_PORT, value: "%[2]d"}
        - {name: SRC_RANGES, value: "0.0.0.0/0,::/0"}
        - {name: DEST_PROTO, value: UDP}
        - {name: DEST_PORT, value: "%[3]d"}
        - {name: DEST_IPS, %[4]s}
`

// klipperLB has the image take klipper-lb's place in the pods that K3s makes: for externalTrafficPolicy Cluster, and Local.
func (i *install) klipperLB() {
	vips := fmt.Sprintf("10.96.0.%[1]d,fd00:10:96::%[1]d", numberOfSteady)
	for _, s := range []struct {
		policy         string
		port, destPort int
		destIPs        string
	}{
		{"cluster", 8080, 80, `value: "` + vips + `"`},
		{"local", 8081, 30000 + numberOfSteady, "valueFrom: {fieldRef: {fieldPath: status.hostIPs}}"},
	} {
		i.step("externalTrafficPolicy "+s.policy, func() {
			i.apply(fmt.Sprintf(svclb, s.policy, s.port, s.destPort, s.destIPs))
			i.rollout("kube-system", "daemonset/svclb-"+s.policy)
			for _, n := range i.nodes {
				for _, a := range []netip.Addr{n.Addr4, n.Addr6} {
					for _, protocol := range []string{"tcp", "udp"} {
						to := netip.AddrPortFrom(a, uint16(s.port))
						lab.Await(i.tb, patience, fmt.Sprintf("an answer at %s by %s", to, protocol), func() error {
							reply, err := i.admin.Ask(i.tb.Context(), protocol, to)
							if err == nil && !strings.HasPrefix(reply.Server, steady) {
								err = fmt.Errorf("%s answers", reply.Server)
							}
							return err
						})
					}
				}
			}
			log := i.kubectl("-n", "kube-system", "logs", "daemonset/svclb-"+s.policy, "--all-containers")
			if bad := slices.DeleteFunc(strings.Split(log, "\n"), func(line string) bool { return !strings.HasPrefix(line, "E") && !strings.HasPrefix(line, "W") }); len(bad) > 0 {
				i.tb.Errorf("the log has %q", bad)
			}
		})
		i.run("kubectl -n kube-system delete daemonset svclb-" + s.policy + " --wait --cascade=foreground")
	}
}
