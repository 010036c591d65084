// SPDX-License-Identifier: Apache-2.0

// Package proxiertest makes decisions for tests of tiers.
package proxiertest

import (
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-proxy/tandem/proxier"
)

// table has a service port for every index that was asked for: a Table alone gives
// indexes, in turn.
var table = struct {
	sync.Mutex
	*proxier.Table
	tracker *proxier.ChangeTracker
	all     []*proxier.Decision
}{
	Table:   proxier.NewTable(proxier.Facts{}, proxier.Policy{}),
	tracker: proxier.NewChangeTracker("", time.Time{}, nil),
}

// Decision is one of nothing but a name and an index.
func Decision(name proxier.ServicePortName, index uint32) *proxier.Decision {
	table.Lock()
	defer table.Unlock()
	for len(table.all) <= int(index) {
		n := len(table.all)
		s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "proxiertest", Name: fmt.Sprint(n)}}
		s.Spec.ClusterIPs = []string{fmt.Sprintf("fd00::%x", n+1)}
		s.Spec.Ports = []v1.ServicePort{{Port: 1}}
		table.tracker.UpdateService(s)
		for _, c := range table.Apply(table.tracker.Take()) {
			table.all = append(table.all, c.New)
		}
	}
	d := *table.all[index]
	d.Name, d.UID, d.Created = name, "", 0
	d.Frontends, d.Backends = nil, nil
	return &d
}
