// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"k8s.io/apimachinery/pkg/types"
)

// KeySocketLB is the annotation of a Pod, or the label of a Namespace for all its pods, that opts pods
// out of socket load balancing with SocketLBDisabled. A Pod with SocketLBEnabled stays whatever its
// Namespace says.
const (
	KeySocketLB      = "tandem-proxy.dev/socket-lb"
	SocketLBDisabled = "disabled"
	SocketLBEnabled  = "enabled"
)

// OptOuts are the pods of this node that opt out of socket load balancing.
type OptOuts struct {
	Pods []OptedOutPod
	// Complete says that there are no others. Without it, opt-outs of pods that are not known
	// stay.
	Complete bool
}

// OptedOutPod is a Pod that opts out of socket load balancing.
type OptedOutPod struct {
	Object types.NamespacedName
	UID    types.UID
	// CgroupUID is the UID in the names of its cgroups. Those of static pods differ from the UID of
	// their Pod.
	CgroupUID string
	// Running says that it has processes.
	Running bool
	// Field is that of the Pod or its Namespace that says so.
	Field string
}
