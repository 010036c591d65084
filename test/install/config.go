// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

import "github.com/tandem-proxy/tandem/test/kubeadm"

const token = "abcdef.0123456789abcdef"

// configuration is kubeadm's. Nodes of this test get their CIDRs of pods from the lab. The limit of
// conntrack is that of the machine, and no file of another network namespace has it.
const configuration = `apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
bootstrapTokens: [{token: ` + token + `}]
localAPIEndpoint: {advertiseAddress: "%[1]s"}
nodeRegistration:
  criSocket: unix:///run/containerd/containerd.sock
  imagePullPolicy: Never
  taints: []
  kubeletExtraArgs: [{name: node-ip, value: "%[1]s,%[2]s"}]
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: %[4]s
networking: {podSubnet: "` + kubeadm.PodSubnet + `", serviceSubnet: "%[3]s"}
controllerManager: {extraArgs: [{name: allocate-node-cidrs, value: "false"}]}
etcd: {local: {extraArgs: [{name: unsafe-no-fsync, value: "true"}]}}
---
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
seccompDefault: true
# As K3s allows them, for the pods of its ServiceLB.
allowedUnsafeSysctls: [net.ipv4.ip_forward, net.ipv6.conf.all.forwarding]
failSwapOn: false
imageGCHighThresholdPercent: 100
evictionHard: {nodefs.available: "0%%", imagefs.available: "0%%", nodefs.inodesFree: "0%%"}
---
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
conntrack: {maxPerCore: 0}
`

const joining = `apiVersion: kubeadm.k8s.io/v1beta4
kind: JoinConfiguration
discovery: {bootstrapToken: {apiServerEndpoint: "%[3]s:6443", token: ` + token + `, unsafeSkipCAVerification: true}}
nodeRegistration:
  criSocket: unix:///run/containerd/containerd.sock
  imagePullPolicy: Never
  kubeletExtraArgs: [{name: node-ip, value: "%[1]s,%[2]s"}]
`
