// SPDX-License-Identifier: Apache-2.0

// Package ipvs reads the virtual servers and the connections of IPVS from /proc/net. Netlink has
// no list of connections.
package ipvs

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// Server is a virtual server. Those by firewall mark are left out.
type Server struct {
	Protocol inet.Protocol
	Address  netip.AddrPort
}

// Connection is one that IPVS forwards.
type Connection struct {
	Protocol inet.Protocol
	// Client opened a connection to Server, and IPVS chose Destination.
	Client, Server, Destination netip.AddrPort
}

// ThreadNet is the directory of the calling thread's network namespace.
const ThreadNet = "/proc/thread-self/net"

// Servers lists the virtual servers. It returns none if IPVS is not loaded.
func Servers(dir string) (list []Server, err error) {
	return read(dir, "ip_vs", parseServer)
}

// Connections lists the connections. It returns none if IPVS is not loaded.
func Connections(dir string) (list []Connection, err error) {
	return read(dir, "ip_vs_conn", parseConnection)
}

func read[T any](dir, name string, parse func([]string) (T, bool, error)) (list []T, err error) {
	f, err := os.Open(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if list, err = lines(f, parse); err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return list, nil
}

func lines[T any](from io.Reader, parse func([]string) (T, bool, error)) (list []T, err error) {
	s := bufio.NewScanner(from)
	for s.Scan() {
		item, ok, err := parse(strings.Fields(s.Text()))
		if err != nil {
			return nil, fmt.Errorf("%w: %.100q", err, s.Text())
		}
		if ok {
			list = append(list, item)
		}
	}
	return list, s.Err()
}

var protocols = map[string]inet.Protocol{"TCP": inet.TCP, "UDP": inet.UDP, "SCTP": inet.SCTP}

// parseServer reads "TCP 0A600001:01BB rr". Other lines are titles and destinations.
func parseServer(words []string) (s Server, ok bool, err error) {
	if len(words) < 3 {
		return s, false, nil
	}
	if s.Protocol, ok = protocols[words[0]]; !ok {
		return s, false, nil
	}
	colon := strings.LastIndexByte(words[1], ':')
	if colon < 0 {
		return s, false, errors.New("a virtual server without a port")
	}
	s.Address, err = parseAddress(strings.Trim(words[1][:colon], "[]"), words[1][colon+1:])
	return s, err == nil, err
}

// parseConnection reads "TCP 0AF40102 9C40 0A600001 0050 0AF40103 1F90 ESTABLISHED 899". Those
// without a client's port are templates of session affinity.
func parseConnection(words []string) (c Connection, ok bool, err error) {
	if len(words) < 7 {
		return c, false, nil
	}
	if c.Protocol, ok = protocols[words[0]]; !ok {
		return c, false, nil
	}
	for i, to := range []*netip.AddrPort{&c.Client, &c.Server, &c.Destination} {
		if *to, err = parseAddress(words[1+2*i], words[2+2*i]); err != nil {
			return c, false, err
		}
	}
	return c, c.Client.Port() != 0, nil
}

// parseAddress reads an IPv4 address as hexadecimal number, or an IPv6 address, and a
// hexadecimal port.
func parseAddress(address, port string) (netip.AddrPort, error) {
	a, err := netip.ParseAddr(address)
	if err != nil {
		raw, hexErr := hex.DecodeString(address)
		v4, ok := netip.AddrFromSlice(raw)
		if hexErr != nil || !ok || !v4.Is4() {
			return netip.AddrPort{}, fmt.Errorf("%q is no address", address)
		}
		a = v4
	}
	n, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("%q is no port", port)
	}
	return netip.AddrPortFrom(a, uint16(n)), nil
}
