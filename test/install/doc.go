// SPDX-License-Identifier: Apache-2.0

// Package install follows docs/install.md on a real cluster: kubeadm makes it of two nodes in
// namespaces of this machine, which run containerd, kubelet and everything that kubeadm
// deploys, and the commands of the page are run as they stand there, while clients in a pod, on
// a node and outside connect to Services.
//
// It is a separate module because its tools are kubeadm, kubelet and others of Kubernetes, in
// the release that test/cluster has. hack/kubeadm.sh builds them, and the nodes' file system.
package install
