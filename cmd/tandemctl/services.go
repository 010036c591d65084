// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/tandem-proxy/tandem/proxier/ebpf"
)

// serviceList is what the services command shows.
type serviceList struct {
	Services []ebpf.ServiceView `json:"services"`
	// Unplaced counts all service ports that do not fit. Those for which there
	// is not even a service id are not among Services.
	Unplaced int `json:"unplaced"`
}

// serviceFilter selects by namespace, name and port; empty means any.
type serviceFilter struct{ namespace, name, port string }

// newServiceFilter reads the argument: NAMESPACE/NAME, with the namespace flag
// also NAME, and either with :PORT, as logs spell service ports.
func newServiceFilter(args []string, namespace string) (serviceFilter, error) {
	f := serviceFilter{namespace: namespace}
	if len(args) == 0 {
		return f, nil
	}
	name := args[0]
	if before, after, qualified := strings.Cut(name, "/"); qualified {
		if namespace != "" && namespace != before {
			return f, usagef("%s is not in namespace %s", name, namespace)
		}
		f.namespace, name = before, after
	}
	f.name, f.port, _ = strings.Cut(name, ":")
	if f.namespace == "" || f.name == "" || strings.Contains(f.name, "/") {
		return f, usagef("%q is no NAMESPACE/NAME", args[0])
	}
	return f, nil
}

func (f serviceFilter) filter(list []ebpf.ServiceView) []ebpf.ServiceView {
	kept := make([]ebpf.ServiceView, 0, len(list))
	for _, s := range list {
		if (f.namespace == "" || f.namespace == s.Namespace) && (f.name == "" || f.name == s.Name) && (f.port == "" || f.port == s.Port) {
			kept = append(kept, s)
		}
	}
	return kept
}

func (f serviceFilter) missing(unplaced int) error {
	name := f.namespace + "/" + f.name
	if f.port != "" {
		name += ":" + f.port
	}
	text := "it does not exist, is headless, or another tier carries it"
	if unplaced > 0 {
		text += fmt.Sprintf("; or it is one of the %d service ports that do not fit (see 'tandemctl status')", unplaced)
	}
	return fmt.Errorf("no Service %s in the maps: %s", name, text)
}
