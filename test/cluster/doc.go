// SPDX-License-Identifier: Apache-2.0

// Package cluster runs a real control plane in the lab of package lab, and kube-proxy on
// the lab's nodes as kubeadm deploys it. kubeadm's own code writes the ServiceAccount, its
// permissions, the ConfigMap and the DaemonSet into the API. The DaemonSet's container is
// started as the API specifies it: with its command, its environment, and exactly its
// mounts. Only kubelet is simulated.
//
// It is a separate module because its tools are kube-apiserver, kube-controller-manager and
// etcd: Kubernetes must not become a dependency of the proxy. It uses one release of
// Kubernetes for everything. The proxy is built from the main module, with the versions of
// that one.
package cluster
