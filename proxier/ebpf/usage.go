// SPDX-License-Identifier: Apache-2.0

package ebpf

import "fmt"

// Usage is how full a table is.
type Usage struct {
	Used int `json:"used"`
	Max  int `json:"max"`
}

// CapacityError says that something does not fit into a table.
type CapacityError struct {
	Table string // frontends, services, backends, slots or ranges
	Need  int
	Usage
}

func (e *CapacityError) Error() string {
	return fmt.Sprintf("needs %d more %s, and %d of %d are in use; raise --ebpf-max-%s", e.Need, e.Table, e.Used, e.Max, e.Table)
}
