// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package e2e tests the real binary on real traffic.
package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/component-base/cli"

	"github.com/tandem-proxy/tandem/cmd/kube-proxy/app"
	"github.com/tandem-proxy/tandem/test/lab"
)

// asProxy makes a copy of the test program run as kube-proxy, so that tests also run on
// machines without a compiler.
const asProxy = "TANDEM_TEST_AS_KUBE_PROXY"

// lacking is the number of a capability that the copy must not have.
const lacking = "TANDEM_TEST_LACKS_CAPABILITY"

func TestMain(m *testing.M) {
	if number := os.Getenv(lacking); number != "" {
		fmt.Fprintln(os.Stderr, goWithout(number))
		os.Exit(1)
	}
	if os.Getenv(asProxy) != "" {
		os.Exit(cli.Run(app.NewCommand()))
	}
	if os.Getenv(asCrowd) != "" {
		fmt.Fprintln(os.Stderr, crowdMain(os.Args[1:]))
		os.Exit(1)
	}
	lab.Main()
	os.Exit(m.Run())
}

// goWithout executes the program again without a capability. Programs that root executes get
// the capabilities of the thread's bounding set.
func goWithout(number string) error {
	n, err := strconv.Atoi(number)
	if err != nil {
		return err
	}
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(n), 0, 0, 0); err != nil {
		return fmt.Errorf("drop capability %d: %w", n, err)
	}
	if err := os.Unsetenv(lacking); err != nil {
		return err
	}
	return unix.Exec("/proc/self/exe", os.Args, os.Environ())
}

// Addresses of the Service in these tests; its endpoints are pods of the lab.
var (
	vip4 = netip.MustParseAddrPort("10.96.0.10:80")
	vip6 = netip.MustParseAddrPort("[fd00:10:96::10]:80")
)

const targetPort = 8080

// targets are the addresses of the Service for clients in the cluster. The names of all targets
// begin with the protocol.
func targets() map[string]netip.AddrPort {
	return map[string]netip.AddrPort{"tcp4": vip4, "udp4": vip4, "tcp6": vip6, "udp6": vip6}
}

// clusterIPs is the Service as pods know it.
const clusterIPs = `apiVersion: v1
kind: Service
metadata: {namespace: shop, name: web}
spec:
  clusterIP: 10.96.0.10
  clusterIPs: ["10.96.0.10", "fd00:10:96::10"]
  ports:
  - {name: t, port: 80, protocol: TCP}
  - {name: u, port: 80, protocol: UDP}
`

// writeManifests writes the Service with those pods as its endpoints.
func writeManifests(t testing.TB, dir, service string, pods ...*lab.Pod) {
	t.Helper()
	var b strings.Builder
	b.WriteString(service)
	for _, family := range []string{"IPv4", "IPv6"} {
		fmt.Fprintf(&b, `---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  namespace: shop
  name: web-%s
  labels: {kubernetes.io/service-name: web}
addressType: %s
ports:
- {name: t, port: %d, protocol: TCP}
- {name: u, port: %[3]d, protocol: UDP}
endpoints:
`, strings.ToLower(family), family, targetPort)
		for _, p := range pods {
			addr := p.Addr4
			if family == "IPv6" {
				addr = p.Addr6
			}
			fmt.Fprintf(&b, "- {addresses: [%q], nodeName: %s}\n", addr, p.Node.Name)
		}
	}
	writeManifest(t, dir, "web.yaml", b.String())
}

// writeManifest replaces a file atomically, as kubelet and editors do.
func writeManifest(t testing.TB, dir, name, text string) {
	t.Helper()
	temp := filepath.Join(dir, "."+name)
	if err := os.WriteFile(temp, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(temp, filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
}

// serviceCIDR makes the proxy reject unallocated ClusterIPs.
const serviceCIDR = `apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: {name: kubernetes}
spec: {cidrs: [10.96.0.0/16, "fd00:10:96::/112"]}
`

// serve starts a TCP and a UDP server in a pod.
func serve(t testing.TB, p *lab.Pod) *lab.Pod {
	t.Helper()
	if _, err := p.ServeTCP(targetPort); err != nil {
		t.Fatal(err)
	}
	if _, err := p.ServeUDP(targetPort); err != nil {
		t.Fatal(err)
	}
	return p
}

// flow is a long-lived connection to the Service.
type flow struct {
	net.Conn
	first lab.Reply
}

// openFlows opens several flows per target, and more until all of the pods have one. All are
// established: of UDP, one that had a single request gives way to newer ones.
func openFlows(t testing.TB, from *lab.Sandbox, ways map[string]netip.AddrPort, pods ...*lab.Pod) (list []flow) {
	t.Helper()
	const each, most = 4, 40
	missing := map[string]bool{}
	for _, p := range pods {
		missing[p.Name] = true
	}
	for round := 0; round < each || len(missing) > 0 && round < most; round++ {
		for name, to := range ways {
			c, err := from.Dial(t.Context(), name[:3], to)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			t.Cleanup(func() { c.Close() })
			r, err := lab.AskConn(t.Context(), c)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			delete(missing, r.Server)
			list = append(list, flow{c, r})
		}
	}
	if len(missing) > 0 {
		t.Fatalf("no flow goes to %v", missing)
	}
	checkAll(t, list)
	return list
}

// check sends another request over the flow: the same server must answer, and see the same
// client.
func (f flow) check(t testing.TB) {
	t.Helper()
	if r, err := lab.AskConn(t.Context(), f); err != nil || r != f.first {
		t.Errorf("long-lived flow to %s over %s: %v %v, first %v", f.RemoteAddr(), f.RemoteAddr().Network(), r, err, f.first)
	}
}
