// SPDX-License-Identifier: Apache-2.0

// Package optouts decides which pods of a node opt out of socket load balancing, by the annotations of
// Pods and the labels of Namespaces. It reads neither: see apiserver.NewPods.
package optouts
