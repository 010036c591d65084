// SPDX-License-Identifier: Apache-2.0

//go:build linux

package klipperlb

import (
	"context"
	"errors"
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

// TestVariables: for combinations of variables, packets arrive in the families where they are to, and in no other.
func TestVariables(t *testing.T) {
	l := lab.NewT(t)
	n := l.Node("node1")
	web, client, other := n.Pod("web"), n.Pod("client"), n.Pod("other")
	for _, serve := range []func(uint16) (*lab.Server, error){web.ServeTCP, web.ServeUDP} {
		if _, err := serve(8080); err != nil {
			t.Fatal(err)
		}
	}
	if lab.SCTPAvailable() == nil {
		if _, err := web.ServeSCTP(8080); err != nil {
			t.Fatal(err)
		}
	}
	both := web.Addr4.String() + "," + web.Addr6.String()
	for i, test := range []struct {
		name      string
		variables map[string]string // of the pod "POD" and the client "CLIENT" are those of each family
		forwards  string            // families
		want      string            // families that are answered
	}{
		{"both families", map[string]string{"DEST_IPS": both}, "46", "46"},
		{"UDP", map[string]string{"DEST_IPS": both, "DEST_PROTO": "UDP"}, "46", "46"},
		{"SCTP", map[string]string{"DEST_IPS": both, "DEST_PROTO": "SCTP"}, "46", "46"},
		{"IPv4 alone", map[string]string{"DEST_IPS": web.Addr4.String()}, "46", "4"},
		{"IPv6 alone", map[string]string{"DEST_IPS": web.Addr6.String()}, "6", "6"},
		{"both, and IPv4 is not forwarded", map[string]string{"DEST_IPS": both}, "6", "6"},
		{"both, and IPv6 is not forwarded", map[string]string{"DEST_IPS": both}, "4", "4"},
		{"ranges of one family", map[string]string{"DEST_IPS": both, "SRC_RANGES": "0.0.0.0/0"}, "46", "4"},
		{"empty ranges", map[string]string{"DEST_IPS": both, "SRC_RANGES": ""}, "46", ""},
		{"ranges that admit the client alone", map[string]string{"DEST_IPS": both, "SRC_RANGES": "CLIENT4/32,CLIENT6/128"}, "46", "46"},
		{"ranges that admit another one alone", map[string]string{"DEST_IPS": both, "SRC_RANGES": other.Addr4.String() + "/32," + other.Addr6.String() + "/128"}, "46", ""},
		{"destinations of both families", map[string]string{"DEST_IPS": both, "SRC_IPS": "POD4,POD6"}, "46", "46"},
		{"a destination of one family", map[string]string{"DEST_IPS": both, "SRC_IPS": "POD6"}, "46", "6"},
		{"another destination", map[string]string{"DEST_IPS": both, "SRC_IPS": "192.0.2.1"}, "46", ""},
		{"several addresses", map[string]string{"DEST_IPS": both + ",192.0.2.1"}, "46", "46"},
	} {
		t.Run(test.name, func(t *testing.T) {
			network := strings.ToLower(test.variables["DEST_PROTO"])
			if err := lab.SCTPAvailable(); network == "sctp" && err != nil {
				lab.SkipOrFailModule(t, err)
			}
			pod := n.Pod(fmt.Sprintf("svclb%d", i))
			if err := pod.Do(func() (err error) {
				for family, path := range map[string]string{"4": "net/ipv4/ip_forward", "6": "net/ipv6/conf/all/forwarding"} {
					if strings.Contains(test.forwards, family) {
						err = errors.Join(err, os.WriteFile("/proc/sys/"+path, []byte("1"), 0))
					}
				}
				return err
			}); err != nil {
				t.Fatal(err)
			}
			variables := map[string]string{"SRC_PORT": "80", "DEST_PORT": "8080", "DEST_PROTO": "TCP"}
			for name, value := range test.variables {
				variables[name] = strings.NewReplacer("POD4", pod.Addr4.String(), "POD6", pod.Addr6.String(), "CLIENT4", client.Addr4.String(), "CLIENT6", client.Addr6.String()).Replace(value)
			}
			if network == "" {
				network = "tcp"
			}
			c := container(t, pod, variables)
			for _, served := range test.forwards { // each family whose rules are written
				if strings.Contains(variables["DEST_IPS"], map[rune]string{'4': ".", '6': ":"}[served]) {
					lab.Await(t, patience, "rules of the family", c.Says(fmt.Sprintf(`"Leading a port to addresses" family="IPv%c"`, served)))
				}
			}
			for family, a := range map[string]netip.Addr{"4": pod.Addr4, "6": pod.Addr6} {
				ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
				if strings.Contains(test.want, family) {
					cancel()
					ctx, cancel = context.WithTimeout(t.Context(), patience)
				}
				reply, err := client.Ask(ctx, network, netip.AddrPortFrom(a, 80))
				cancel()
				if want := strings.Contains(test.want, family); want != (err == nil && reply.Server == "web") {
					t.Errorf("IPv%s: answered by %q, %v; want an answer: %v", family, reply.Server, err, want)
				}
			}
			c.Terminate(t)
		})
	}
}

// TestReplacedRule: a rule that another one replaced counts as lost.
func TestReplacedRule(t *testing.T) {
	n := lab.NewT(t).Node("node1")
	pod := n.Pod("svclb")
	if err := pod.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) }); err != nil {
		t.Fatal(err)
	}
	c := container(t, pod, map[string]string{"SRC_PORT": "80", "DEST_PORT": "8080", "DEST_PROTO": "TCP", "DEST_IPS": "10.43.0.10"})
	lab.Await(t, patience, "rules", c.Says("Leading a port to addresses"))
	if out, err := tool(pod, "iptables", "-t", "nat", "-R", "SVCLB-PRE-TCP-80", "1", "-p", "tcp", "--dport", "80", "-j", "DNAT", "--to-destination", "192.0.2.1:80"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	lab.Await(t, patience, "the rule to be written again", c.Says("Rules were lost; written again"))
	if out, err := tool(pod, "iptables", "-t", "nat", "-S", "SVCLB-PRE-TCP-80"); err != nil || strings.Contains(out, "192.0.2.1") {
		t.Errorf("%v: %s", err, out)
	}
	c.Terminate(t)
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
