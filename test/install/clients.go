// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

import (
	"slices"
	"strings"

	"github.com/tandem-proxy/tandem/test/lab"
)

// startClients starts those in a pod, on a node and outside.
func (c *cluster) startClients() {
	c.tb.Helper()
	inside, outside := c.addresses(numberOfSteady)
	n := c.nodes[0]
	id := c.kubectl("get", "pods", "--selector=app=client", "-o=jsonpath={.items[0].status.containerStatuses[0].containerID}")
	pid, err := n.run(c.tb.Context(), "bash", "-c", `ctr -n k8s.io tasks ls | while read -r id pid _; do [[ $id != "$0" ]] || echo $pid; done`, strings.TrimPrefix(id, "containerd://"))
	if err != nil {
		c.tb.Fatalf("find the client's pod: %v", err)
	}
	const asPod = `cgroup=$(sed -n s/^0:://p /proc/$0/cgroup) && echo 0 >/sys/fs/cgroup$cgroup/cgroup.procs && exec nsenter --target $0 --net /opt/client`
	pod, err := n.within(c.tb.Context(), "env", asClient+"="+strings.Join(inside, ","), "bash", "-c", asPod, strings.TrimSpace(pid))
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	host, err := n.within(c.tb.Context(), "env", asClient+"="+strings.Join(inside, ","), "/opt/client")
	if err != nil {
		c.tb.Fatalf("%v", err)
	}
	far := c.admin.Command(c.tb.Context(), n.file("opt/client"))
	far.Env = []string{asClient + "=" + strings.Join(outside, ",")}
	defer c.counted() // begin when all of them run
	for where, cmd := range map[string]*lab.Cmd{"pod": pod, "host": host, "outside": far} {
		p, err := startClient(where, cmd)
		if err != nil {
			c.tb.Fatalf("start the client %s: %v", where, err)
		}
		c.clients = append(c.clients, p)
	}
}

// stopClients ends those at a place, or all.
func (c *cluster) stopClients(where ...string) {
	c.clients = slices.DeleteFunc(c.clients, func(p *process) bool {
		ends := len(where) == 0 || slices.Contains(where, p.where)
		if ends {
			_ = p.Close()
		}
		return ends
	})
}

// counted is what clients counted since the last call, by where they are.
func (c *cluster) counted() map[string]*counts {
	c.tb.Helper()
	all := map[string]*counts{}
	for _, p := range c.clients {
		counted, err := p.take()
		if err != nil {
			c.tb.Fatalf("%v", err)
		}
		all[p.where] = counted
	}
	return all
}
