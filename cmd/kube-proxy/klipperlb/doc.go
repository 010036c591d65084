// SPDX-License-Identifier: Apache-2.0

// Package klipperlb does what the image of klipper-lb does in the pods of K3s' ServiceLB: rules in the network namespace of the pod lead what
// arrives at a port to addresses of a Service. It reads the same variables, so that an unmodified K3s can run it (--servicelb-image).
package klipperlb
