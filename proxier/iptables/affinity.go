// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"os"
	"strconv"
	"strings"
	"sync"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
)

// recentClients has the number of clients that the kernel remembers for each endpoint of a
// Service with session affinity. It is a parameter of the module, set when that is loaded.
const recentClients = "/sys/module/xt_recent/parameters/ip_list_tot"

// manyClients is a number at which LRU eviction of clients hardly matters.
const manyClients = 10_000

var warnOfAffinity sync.Once

// checkAffinity logs, once, that the kernel may forget clients of Services with session
// affinity.
func checkAffinity(ctx context.Context, u *proxier.Update) {
	for i := range u.Changes {
		if d := u.Changes[i].New; d != nil && d.Affinity > 0 {
			warnOfAffinity.Do(func() { logAffinity(klog.FromContext(ctx), d.Name) })
			return
		}
	}
}

func logAffinity(logger klog.Logger, example proxier.ServicePortName) {
	text, err := os.ReadFile(recentClients)
	if err != nil {
		return // the module comes with the first rule
	}
	if n, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && n < manyClients {
		logger.Info("Session affinity remembers few clients for each endpoint; raise the limit by 'options xt_recent ip_list_tot=N' in /etc/modprobe.d",
			"clients", n, "servicePort", example)
	}
}
