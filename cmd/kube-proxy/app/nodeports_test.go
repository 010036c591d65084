// SPDX-License-Identifier: Apache-2.0

//go:build linux

package app

import (
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/config"
	"github.com/tandem-proxy/tandem/test/lab"
)

var nodePorts = config.PortRange{First: 30000, Last: 32767}

// set has the kernel give ports out of a range, except for some.
func set(ephemeral, reserved string) error {
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte(ephemeral), 0o644); err != nil {
		return err
	}
	return os.WriteFile("/"+reservedPorts, []byte(reserved+"\n"), 0o644)
}

func TestReserveNodePorts(t *testing.T) {
	n := lab.NewT(t).Node("node1")
	for _, tt := range []struct{ name, ephemeral, before, want string }{
		{"the usual range lies above", "32768 60999", "", ""},
		{"what others reserved, without need", "32768 60999", "8080,40000-40010", "8080,40000-40010"},
		{"all are inside", "1024 65535", "", "30000-32767"},
		{"the last is inside", "32767 60999", "", "30000-32767"},
		{"the first is inside", "20000 30000", "", "30000-32767"},
		{"beside what others reserved", "1024 65535", "8080,40000-40010", "8080,30000-32767,40000-40010"},
		{"others reserved neighbours", "1024 65535", "29999,32768", "29999-32768"},
		{"others reserved some of them", "1024 65535", "30080,32000-33000", "30000-33000"},
		{"others reserved all of them", "1024 65535", "20000-40000", "20000-40000"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := n.Do(func() error { return set(tt.ephemeral, tt.before) }); err != nil {
				t.Fatal(err)
			}
			for _, when := range []string{"first", "second"} {
				var text []byte
				err := n.Do(func() (err error) {
					if err = reserveNodePorts(klog.Background(), nodePorts); err == nil {
						text, err = os.ReadFile("/" + reservedPorts)
					}
					return err
				})
				if got := strings.TrimSpace(string(text)); err != nil || got != tt.want {
					t.Errorf("the %s time: %q, %v; want %q", when, got, err, tt.want)
				}
			}
		})
	}
}

// What is reserved, the kernel gives neither to a socket that binds any port nor to one
// that connects.
func TestReservedPortsAreNotGivenOut(t *testing.T) {
	const listening = 8080
	type opener func(*lab.Node) (io.Closer, uint16, error)
	bind := func(serve func(*lab.Sandbox, uint16) (*lab.Server, error)) opener {
		return func(n *lab.Node) (io.Closer, uint16, error) {
			s, err := serve(n.Sandbox, 0)
			if err != nil {
				return nil, 0, err
			}
			return s, s.Port, nil
		}
	}
	connect := func(network, to string) opener {
		return func(n *lab.Node) (io.Closer, uint16, error) {
			c, err := n.Dial(t.Context(), network, netip.AddrPortFrom(netip.MustParseAddr(to), listening))
			if err != nil {
				return nil, 0, err
			}
			return c, netip.MustParseAddrPort(c.LocalAddr().String()).Port(), nil
		}
	}
	l := lab.NewT(t)
	for name, open := range map[string]opener{
		"bind-tcp": bind((*lab.Sandbox).ServeTCP), "bind-udp": bind((*lab.Sandbox).ServeUDP),
		"connect-tcp4": connect("tcp", "127.0.0.1"), "connect-tcp6": connect("tcp", "::1"),
		"connect-udp4": connect("udp", "127.0.0.1"), "connect-udp6": connect("udp", "::1"),
	} {
		t.Run(name, func(t *testing.T) {
			// Each has its own: ports that were in use are not free at once.
			n := l.Node(name)
			if _, err := n.ServeTCP(listening); err != nil {
				t.Fatal(err)
			}
			err := n.Do(func() error {
				// Two are left.
				if err := set("30000 32769", ""); err != nil {
					return err
				}
				return reserveNodePorts(klog.Background(), nodePorts)
			})
			if err != nil {
				t.Fatal(err)
			}
			var got []uint16
			for range 2 {
				c, port, err := open(n)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				got = append(got, port)
			}
			slices.Sort(got)
			if !slices.Equal(got, []uint16{32768, 32769}) {
				t.Errorf("ports %v", got)
			}
			if c, port, err := open(n); err == nil {
				c.Close()
				t.Errorf("and then port %d", port)
			}
		})
	}
}
