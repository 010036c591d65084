// SPDX-License-Identifier: Apache-2.0

//go:build linux

package container

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/test/lab"
)

// ServiceAccount is where the token of a pod's ServiceAccount is in each of its containers:
// the admission of pods adds the volume.
const ServiceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"

// Of is a container of a pod as kubelet has it run on a node: its command, its variables,
// its mounts, and no others but the token, which is in the directory account. The source of
// a volume is where it is on the node. The image is the caller's to add.
func Of(pod *v1.PodSpec, of *v1.Container, node *lab.Node, account string, source func(*v1.Volume) (string, error)) (c Container, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("container %s: %w", of.Name, err)
		}
	}()
	if !pod.HostNetwork {
		return c, errors.New("its pod has a network of its own, and here they have the node's")
	}
	c = Container{HostPID: pod.HostPID, Mounts: []Mount{{account, ServiceAccount, true}}}
	if s := of.SecurityContext; s != nil {
		c.Privileged, c.ReadOnly = ptr.Deref(s.Privileged, false), ptr.Deref(s.ReadOnlyRootFilesystem, false)
		if s.Capabilities != nil {
			for _, name := range s.Capabilities.Add {
				c.Capabilities = append(c.Capabilities, string(name))
			}
		}
	}
	var references []string
	for _, e := range of.Env {
		value := e.Value
		if from := e.ValueFrom; from != nil {
			if from.FieldRef == nil || from.FieldRef.FieldPath != "spec.nodeName" {
				return c, fmt.Errorf("its variable %s is neither a text nor the node's name", e.Name)
			}
			value = node.Name
		}
		c.Env = append(c.Env, e.Name+"="+value)
		references = append(references, "$("+e.Name+")", value)
	}
	expand := strings.NewReplacer(references...)
	for _, arg := range slices.Concat(of.Command, of.Args) {
		c.Args = append(c.Args, expand.Replace(arg))
	}
	for _, m := range of.VolumeMounts {
		i := slices.IndexFunc(pod.Volumes, func(v v1.Volume) bool { return v.Name == m.Name })
		if i < 0 {
			return c, fmt.Errorf("its pod has no volume %s", m.Name)
		}
		from, err := source(&pod.Volumes[i])
		if err != nil {
			return c, err
		}
		c.Mounts = append(c.Mounts, Mount{from, m.MountPath, m.ReadOnly})
	}
	return c, nil
}
