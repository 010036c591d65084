// SPDX-License-Identifier: Apache-2.0

//go:build linux

package klipperlb

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// asPod makes a copy of the test program run as the container of a pod does.
const asPod = "TANDEM_TEST_AS_KLIPPER_LB"

func TestMain(m *testing.M) {
	if os.Getenv(asPod) != "" {
		os.Exit(Main())
	}
	lab.Main()
	os.Exit(m.Run())
}

const patience = 30 * time.Second

// container runs in a pod's network namespace with these variables.
func container(t *testing.T, pod *lab.Pod, variables map[string]string) *lab.Watched {
	t.Helper()
	c := pod.Command(context.Background(), os.Args[0])
	c.Env = append(os.Environ(), asPod+"=1")
	for name, value := range variables {
		c.Env = append(c.Env, name+"="+value)
	}
	w := lab.Watch(c)
	w.Begin(t)
	return w
}

// tool runs a program in a pod's network namespace.
func tool(pod *lab.Pod, name string, args ...string) (string, error) {
	out, err := pod.Command(context.Background(), name, args...).CombinedOutput()
	return string(out), err
}

// TestPod: packets for the pod's port reach the address, in both families and for two containers of one pod; sources that are not admitted do not;
// rules that are lost are written again; and nothing is left at the end.
func TestPod(t *testing.T) {
	l := lab.NewT(t)
	n := l.Node("node1")
	pod, web, client, other := n.Pod("svclb"), n.Pod("web"), n.Pod("client"), n.Pod("other")
	if _, err := exec.LookPath("iptables"); err != nil {
		t.Fatal(err)
	}
	for _, serve := range []func(uint16) (*lab.Server, error){web.ServeTCP, web.ServeUDP} {
		if _, err := serve(8080); err != nil {
			t.Fatal(err)
		}
	}
	// As kubelet does for a pod with these in its securityContext.
	err := pod.Do(func() error {
		for _, path := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
			if err := os.WriteFile("/proc/sys/"+path, []byte("1"), 0); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	variables := map[string]string{
		"SRC_PORT": "80", "DEST_PORT": "8080", "DEST_PROTO": "TCP", "DEST_IPS": web.Addr4.String() + "," + web.Addr6.String(),
		"SRC_RANGES": client.Addr4.String() + "/32," + client.Addr6.String() + "/128",
	}
	tcp := container(t, pod, variables)
	variables["DEST_PROTO"] = "UDP"
	udp := container(t, pod, variables)
	addresses := []netip.AddrPort{netip.AddrPortFrom(pod.Addr4, 80), netip.AddrPortFrom(pod.Addr6, 80)}
	answered := func(what string) {
		t.Helper()
		for _, to := range addresses {
			for _, network := range []string{"tcp", "udp"} {
				lab.Await(t, patience, fmt.Sprintf("%s: %s over %s", what, to, network), func() error {
					reply, err := client.Ask(t.Context(), network, to)
					if err == nil && reply.Server != "web" {
						err = fmt.Errorf("%s answers", reply.Server)
					}
					return err
				})
			}
		}
	}
	answered("at first")
	for _, to := range addresses {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		if reply, err := other.Ask(ctx, "tcp", to); err == nil {
			t.Errorf("a source that is not admitted is answered by %s", reply.Server)
		}
		cancel()
	}
	for _, name := range []string{"iptables", "ip6tables"} {
		if out, err := tool(pod, name, "-t", "nat", "-F"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	answered("after the rules were lost")
	if err := tcp.Says("Rules were lost; written again")(); err != nil {
		t.Error(err)
	}
	tcp.Terminate(t)
	udp.Terminate(t)
	for _, name := range []string{"iptables-save", "ip6tables-save"} {
		out, err := tool(pod, name)
		if err != nil || strings.Contains(out, "SVCLB") {
			t.Errorf("after the end, %s prints (%v)\n%s", name, err, out)
		}
	}
}

// TestNoForwarding: the error names the setting.
func TestNoForwarding(t *testing.T) {
	pod := lab.NewT(t).Node("node1").Pod("svclb")
	c := pod.Command(context.Background(), os.Args[0])
	c.Env = append(os.Environ(), asPod+"=1", "SRC_PORT=80", "DEST_PORT=80", "DEST_PROTO=TCP", "DEST_IPS=10.43.0.10")
	out, err := c.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "net.ipv4.ip_forward is 0") {
		t.Errorf("ends with %v:\n%s", err, out)
	}
}
