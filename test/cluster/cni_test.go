// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/tandem-proxy/tandem/test/hosts"
	"github.com/tandem-proxy/tandem/test/lab"
)

// CNIEnv names the directory of the CNIs' daemons.
const CNIEnv = "TANDEM_CNI"

// cni is a CNI whose own daemons connect the nodes.
type cni struct {
	name, daemon string
	// files of each node, by name, and the daemon's environment and arguments, in which {node}, {dir} and {kubeconfig} are replaced.
	files     map[string]string
	env, args []string
	bridge    string
	mtu       int
	chain     string // of its rules
}

// flannel is as its manifest starts it, with this backend.
func flannel(backend string, mtu int) cni {
	return cni{
		name: "flannel-" + backend, daemon: "flanneld", bridge: "cni0", mtu: mtu, chain: "FLANNEL-POSTRTG",
		files: map[string]string{"net-conf.json": `{
			"Network": "10.244.0.0/16", "EnableIPv4": true, "IPv6Network": "fd00:10:244::/48", "EnableIPv6": true,
			"Backend": {"Type": "` + backend + `"}
		}`},
		env:  []string{"NODE_NAME={node}", "POD_NAME=flannel-{node}", "POD_NAMESPACE=kube-flannel"},
		args: []string{"--kube-subnet-mgr", "--ip-masq", "--kubeconfig-file={kubeconfig}", "--net-config-path={dir}/net-conf.json", "--subnet-file={dir}/subnet.env", "--iface=" + lab.Uplink},
	}
}

var cnis = []cni{
	flannel("vxlan", 1430),
	flannel("host-gw", 1500),
	{
		name: "kube-router", daemon: "kube-router", bridge: "kube-bridge", mtu: 1500, chain: "KUBE-ROUTER-FORWARD",
		files: map[string]string{"kuberouter.conflist": `{
			"cniVersion": "0.3.0", "name": "mynet",
			"plugins": [{"name": "kubernetes", "type": "bridge", "bridge": "kube-bridge", "isDefaultGateway": true, "hairpinMode": true, "ipam": {"type": "host-local"}}]
		}`},
		env: []string{"KUBE_ROUTER_CNI_CONF_FILE={dir}/kuberouter.conflist"},
		args: []string{
			"--run-router=true", "--run-firewall=true", "--run-service-proxy=false", "--enable-ipv4", "--enable-ipv6", "--bgp-graceful-restart",
			"--kubeconfig={kubeconfig}", "--hostname-override={node}", "--service-cluster-ip-range=" + lab.ServicePrefix4.String(), "--service-cluster-ip-range=" + lab.ServicePrefix6.String(),
		},
	},
}

// TestCNI plays on hosts whose network a CNI's own daemons set up, from a real API server: its tunnels, routes and rules are those of the
// project, not what test/hosts knows of them.
func TestCNI(t *testing.T) {
	dir := os.Getenv(CNIEnv)
	if dir == "" {
		lab.SkipUnnamed(t, CNIEnv, fmt.Errorf("%s is not set: it has to be the directory of flanneld and kube-router, which hack/cni.sh builds and prints", CNIEnv))
	}
	a := assetsT(t)
	for _, c := range cnis {
		t.Run(c.name, func(t *testing.T) { c.test(t, a, dir) })
	}
}

func (c *cni) test(t *testing.T, a assets, programs string) {
	hosts.PluginsDir = "../hosts/plugins"
	pods, err := json.Marshal([]map[string]any{{
		"type": "bridge", "bridge": c.bridge, "isDefaultGateway": true, "hairpinMode": true, "mtu": c.mtu,
		"ipam": map[string]any{"type": "host-local", "dataDir": "{state}/{nodename}", "ranges": []any{[]any{map[string]string{"subnet": "{pods4}"}}, []any{map[string]string{"subnet": "{pods6}"}}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	// The routes of the lab are in the way.
	bare := hosts.Setup{Each: "route del {otherpods}\nroute del blackhole {pods}\n"}
	d := &daemons{cni: c, assets: a, programs: programs, dir: t.TempDir()}
	p := &hosts.Profile{
		Name: c.name, Unattached: true, Node: bare, Other: bare, Pods: hosts.Attachment{CNI: string(pods)}, Daemons: d.start,
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(d.logs())
		}
	})
	l := lab.NewT(t, p.LabOptions())
	w, err := p.Build(t.Context(), l, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	}()
	began := time.Now()
	ours := hosts.Program{Title: "mode ebpf", Binary: ourBinary(t), Mode: "ebpf", Ours: true}
	control := hosts.Program{Title: "mode iptables", Binary: ourBinary(t), Mode: "iptables", Ours: true}
	cells := p.Cells()
	o, err := w.Run(t.Context(), hosts.Run{Program: ours, Cleaner: ours, Cells: cells})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d cells, played in %v", len(cells), time.Since(began).Round(time.Second))
	lost := w.Unexpected(o.Results)
	if len(lost) == 0 {
		return
	}
	t.Logf("the node:\n%s\nthe proxy's log:\n%s", w.State(t.Context()), o.Log)
	netfilter, err := w.Run(t.Context(), hosts.Run{Program: control, Cleaner: ours, Cells: lost})
	if err != nil {
		t.Error(err)
	}
	for _, cell := range lost {
		t.Errorf("%s: %v; with %s: %v", cell, o.Results[cell], control.Title, netfilter.Results[cell])
	}
}

// daemons are the processes of a CNI, with a control plane.
type daemons struct {
	*cni
	assets
	programs, dir string
	plane         *controlPlane
	running       []*lab.Watched
}

func (d *daemons) start(ctx context.Context, w *hosts.World) error {
	machine, err := w.Lab.AddNode("control-plane")
	if err != nil {
		return err
	}
	if d.plane, err = startControlPlane(ctx, d.assets, machine, d.dir); err != nil {
		return err
	}
	kubeconfig := d.plane.path(adminConf)
	nodes := []*lab.Node{w.Node, w.Other}
	for _, n := range nodes {
		if err := addNode(ctx, d.plane.client, n, ""); err != nil {
			return err
		}
	}
	for _, n := range nodes {
		if err := d.startOn(n, kubeconfig); err != nil {
			return err
		}
	}
	for i, n := range nodes {
		other := nodes[1-i]
		for _, save := range []string{"iptables-save", "ip6tables-save"} {
			if err := d.await(ctx, fmt.Sprintf("chain %s of %s on %s", d.chain, save, n.Name), func() (bool, error) {
				out, err := n.Command(ctx, save).Output()
				return strings.Contains(string(out), d.chain), err
			}); err != nil {
				return err
			}
		}
		for _, pods := range []netip.Prefix{other.PodPrefix4, other.PodPrefix6} {
			if err := d.await(ctx, fmt.Sprintf("a route of %s to %s", n.Name, pods), func() (bool, error) { return hasRoute(n, pods) }); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d *daemons) startOn(n *lab.Node, kubeconfig string) error {
	dir := filepath.Join(d.dir, n.Name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	for name, text := range d.files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	fill := strings.NewReplacer("{node}", n.Name, "{dir}", dir, "{kubeconfig}", kubeconfig)
	filled := func(list []string) (out []string) {
		for _, text := range list {
			out = append(out, fill.Replace(text))
		}
		return out
	}
	p := lab.Watch(n.Command(context.Background(), filepath.Join(d.programs, d.daemon), filled(d.args)...))
	p.Env = append(os.Environ(), filled(d.env)...)
	d.running = append(d.running, p)
	return p.Start()
}

// await waits for what daemons do, while they run.
func (d *daemons) await(ctx context.Context, what string, condition func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		ok, err := condition()
		if ok {
			return nil
		}
		for _, p := range d.running {
			if p.Ended() {
				return fmt.Errorf("%v has ended", p.Args)
			}
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("%s did not appear", what), err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// hasRoute reports whether a node has a route by a gateway to these pods.
func hasRoute(n *lab.Node, pods netip.Prefix) (bool, error) {
	family := netlink.FAMILY_V6
	if pods.Addr().Is4() {
		family = netlink.FAMILY_V4
	}
	to := &net.IPNet{IP: pods.Addr().AsSlice(), Mask: net.CIDRMask(pods.Bits(), pods.Addr().BitLen())}
	list, err := n.Netlink().RouteListFiltered(family, &netlink.Route{Dst: to}, netlink.RT_FILTER_DST)
	return slices.ContainsFunc(list, func(r netlink.Route) bool { return r.Gw != nil }), err
}

func (d *daemons) logs() string {
	var b strings.Builder
	for _, p := range d.running {
		fmt.Fprintf(&b, "log of %v:\n%s\n", p.Args, p.Log)
	}
	return b.String()
}
