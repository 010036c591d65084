// SPDX-License-Identifier: Apache-2.0

//go:build linux

package install

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/test/lab"
)

//go:embed node.sh
var nodeScript string

//go:embed runc.sh
var runcScript string

// node is a machine with containerd and kubelet, at a node of the lab.
type node struct {
	*lab.Node
	parts  string // of hack/kubeadm.sh
	dir    string // what the node writes
	cgroup string
	all    *lab.Watched // ends the node
}

// containerdConfig is for containerd 1.7. Its oom score cannot be lowered without
// CAP_SYS_RESOURCE, which test machines may lack.
const containerdConfig = `version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "%s"
  restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  BinaryName = "/opt/runc.sh"
`

// networkConfig has pods on a bridge, in the CIDRs that the lab has routes to.
const networkConfig = `{
  "cniVersion": "1.0.0", "name": "pods",
  "plugins": [
    {
      "type": "bridge", "bridge": "cni0", "isGateway": true, "isDefaultGateway": true, "hairpinMode": true,
      "ipam": {"type": "host-local", "ranges": [[{"subnet": "%s"}], [{"subnet": "%s"}]]}
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`

// networkFile has the configuration.
const networkFile = "etc/cni/net.d/10-pods.conflist"

func networkFor(n *lab.Node) string { return fmt.Sprintf(networkConfig, n.PodPrefix4, n.PodPrefix6) }

// newNode adds a node, which has no image and is not part of a cluster.
func newNode(l *lab.Lab, name, parts, dir, pause string) (*node, error) {
	on, err := l.AddNode(name)
	if err != nil {
		return nil, err
	}
	n := &node{Node: on, parts: parts, dir: filepath.Join(dir, name)}
	if n.cgroup, err = l.Domain(name); err != nil {
		return nil, err
	}
	// The bridge has the route.
	for _, prefix := range []string{n.PodPrefix4.String(), n.PodPrefix6.String()} {
		to, err := netlink.ParseIPNet(prefix)
		if err == nil {
			err = n.Netlink().RouteDel(&netlink.Route{Dst: to, Type: unix.RTN_BLACKHOLE})
		}
		if err != nil {
			return nil, fmt.Errorf("remove the route to %s: %w", prefix, err)
		}
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	for path, text := range map[string]string{
		"etc/containerd/config.toml": fmt.Sprintf(containerdConfig, pause),
		networkFile:                  networkFor(n.Node),
		"etc/resolv.conf":            fmt.Sprintf("nameserver %s\n", l.Fabric().Addr4),
		"etc/hosts":                  fmt.Sprintf("127.0.0.1 localhost\n::1 localhost\n%s %s\n", n.Addr4, name),
		"etc/hostname":               name + "\n",
		"etc/machine-id":             fmt.Sprintf("%032x\n", n.Index),
		"opt/runc.sh":                runcScript,
		"opt/client":                 string(self),
		"../node.sh":                 nodeScript,
	} {
		if err := n.write(path, text); err != nil {
			return nil, err
		}
	}
	return n, nil
}

// file is where this machine sees a file that the node has written.
func (n *node) file(path string) string { return filepath.Join(n.dir, "upper", path) }

func (n *node) write(path, text string) error {
	path = n.file(path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(text), 0o755)
}

// start has the node boot, and waits for containerd.
func (n *node) start(tb lab.TB) {
	tb.Helper()
	n.all = lab.Watch(n.Command(context.Background(), "sh", filepath.Join(n.dir, "node.sh"), n.Name, n.cgroup, n.parts, n.dir))
	n.all.Begin(tb)
	n.all.Await(tb, time.Minute, "containerd on "+n.Name, func() error {
		_, err := n.run(tb.Context(), "ctr", "version")
		return err
	})
}

// shutDown ends the node as a reboot does: its file system and its addresses are left, and nothing else.
func (n *node) shutDown(tb lab.TB) error {
	plug, err := n.Unplug()
	if err != nil {
		return err
	}
	if err := n.all.Close(); err != nil {
		return err
	}
	for _, command := range []string{"nft flush ruleset", "conntrack -F", "ip link delete cni0"} {
		// Programs are those of the node.
		args := append([]string{filepath.Join(n.parts, "root")}, strings.Fields(command)...)
		if out, err := n.Command(tb.Context(), "chroot", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", command, err, out)
		}
	}
	// With the cgroup, the programs at it are gone.
	if err := lab.RemoveCgroup(n.cgroup); err != nil {
		return err
	}
	return errors.Join(os.Mkdir(n.cgroup, 0o755), plug())
}

// first is the node's process 1, by its number on this machine.
func (n *node) first() (string, error) {
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", n.all.Process.Pid))
	if first := strings.Fields(string(children)); len(first) == 1 {
		return first[0], nil
	}
	return "", errors.Join(fmt.Errorf("node %s does not run", n.Name), err)
}

// enter moves a process into the node, where it runs a command.
const enter = `echo 0 >"$0/node/cgroup.procs" && exec nsenter --target "$1" --mount --uts --ipc --pid --cgroup -- ` +
	`env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin HOME=/root "${@:2}"`

// within prepares a command in all namespaces of the node.
func (n *node) within(ctx context.Context, args ...string) (*lab.Cmd, error) {
	first, err := n.first()
	if err != nil {
		return nil, err
	}
	return n.Command(ctx, "bash", append([]string{"-c", enter, n.cgroup, first}, args...)...), nil
}

// run returns what a command in the node says.
func (n *node) run(ctx context.Context, args ...string) (string, error) {
	c, err := n.within(ctx, args...)
	if err != nil {
		return "", err
	}
	out, err := c.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s on %s: %w\n%s", strings.Join(args, " "), n.Name, err, out)
	}
	return string(out), err
}
