// SPDX-License-Identifier: Apache-2.0

// Package cluster runs a real control plane over the lab of package lab, and kube-proxy on
// the lab's nodes as kubeadm has it run: the ServiceAccount, what it may do, the ConfigMap
// and the DaemonSet are those that kubeadm's own code writes into the API, and the
// DaemonSet's container is started from what the API says of it: its command, its
// environment, its mounts and no others. Only kubelet is played.
//
// It is a module of its own because kube-apiserver, kube-controller-manager and etcd are
// its tools: Kubernetes must not get into the requirements of the proxy. It has one release
// of Kubernetes for everything; the proxy it runs is built from its own module, with the
// versions of that one.
package cluster
