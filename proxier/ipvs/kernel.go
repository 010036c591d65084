// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"

	mobyipvs "github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/proxier"
)

// kernelServers are the virtual servers of a network namespace.
type kernelServers struct{ handle *mobyipvs.Handle }

// openServers finds out whether there is IPVS, which loads it. Only then is the library
// asked, which never forgets that there was none.
func openServers() (*kernelServers, error) {
	_, err := netlink.GenlFamilyGet("IPVS")
	if err != nil {
		// Older kernels do not load it for being asked.
		_ = exec.Command("modprobe", "ip_vs").Run()
		_, err = netlink.GenlFamilyGet("IPVS")
	}
	if err != nil {
		return nil, fmt.Errorf("find IPVS in the kernel (module ip_vs): %w", err)
	}
	handle, err := mobyipvs.New("")
	if err != nil {
		return nil, fmt.Errorf("open IPVS: %w", err)
	}
	return &kernelServers{handle}, nil
}

func (s *kernelServers) Close() { s.handle.Close() }

var netmasks = [proxier.Families]uint32{proxier.IPv4: 0xffffffff, proxier.IPv6: 128}

func service(k serverKey, is server) *mobyipvs.Service {
	family := proxier.FamilyOf(k.Addr.Addr())
	return &mobyipvs.Service{
		AddressFamily: addressFamilies[family], Address: k.Addr.Addr().AsSlice(), Port: k.Addr.Port(), Protocol: uint16(k.Protocol),
		SchedName: is.Scheduler, Flags: is.Flags, Timeout: is.Timeout, Netmask: netmasks[family],
	}
}

var addressFamilies = [proxier.Families]uint16{unix.AF_INET, unix.AF_INET6}

func (s *kernelServers) List() (map[serverKey]server, error) {
	list, err := s.handle.GetServices()
	if err != nil {
		return nil, err
	}
	out := make(map[serverKey]server, len(list))
	for _, is := range list {
		addr, ok := addrOf(is.Address)
		if !ok || is.FWMark != 0 {
			continue // by mark: never ours
		}
		out[keyOf(netip.AddrPortFrom(addr, is.Port), proxier.Protocol(is.Protocol))] = server{
			Scheduler: is.SchedName, Flags: is.Flags &^ flagHashed, Timeout: is.Timeout,
		}
	}
	return out, nil
}

func addrOf(ip net.IP) (netip.Addr, bool) { return netip.AddrFromSlice(ip) }

func (s *kernelServers) Destinations(k serverKey) (map[netip.AddrPort]destination, error) {
	list, err := s.handle.GetDestinations(service(k, server{}))
	if err != nil {
		return nil, err
	}
	out := make(map[netip.AddrPort]destination, len(list))
	for _, d := range list {
		if addr, ok := addrOf(d.Address); ok {
			out[netip.AddrPortFrom(addr, d.Port)] = destination{Weight: d.Weight, Active: d.ActiveConnections, Inactive: d.InactiveConnections}
		}
	}
	return out, nil
}

func (s *kernelServers) Add(k serverKey, is server) error {
	err := s.handle.NewService(service(k, is))
	if errors.Is(err, unix.EEXIST) {
		return s.Change(k, is)
	}
	return err
}

func (s *kernelServers) Change(k serverKey, is server) error {
	return s.handle.UpdateService(service(k, is))
}

func (s *kernelServers) Delete(k serverKey) error {
	return unless(s.handle.DelService(service(k, server{})), unix.ESRCH)
}

func (s *kernelServers) destination(to netip.AddrPort, weight int) *mobyipvs.Destination {
	return &mobyipvs.Destination{
		AddressFamily: addressFamilies[proxier.FamilyOf(to.Addr())], Address: to.Addr().AsSlice(), Port: to.Port(), Weight: weight,
		ConnectionFlags: mobyipvs.ConnFwdMasq,
	}
}

func (s *kernelServers) AddDestination(k serverKey, to netip.AddrPort, weight int) error {
	err := s.handle.NewDestination(service(k, server{}), s.destination(to, weight))
	if errors.Is(err, unix.EEXIST) {
		return s.ChangeDestination(k, to, weight)
	}
	return err
}

func (s *kernelServers) ChangeDestination(k serverKey, to netip.AddrPort, weight int) error {
	err := s.handle.UpdateDestination(service(k, server{}), s.destination(to, weight))
	if errors.Is(err, unix.ENOENT) {
		return unix.ESRCH // what is there is not what was read
	}
	return err
}

func (s *kernelServers) DeleteDestination(k serverKey, to netip.AddrPort) error {
	return unless(s.handle.DelDestination(service(k, server{}), s.destination(to, 0)), unix.ENOENT, unix.ESRCH)
}

// unless is an error that is none of those.
func unless(err error, are ...error) error {
	for _, e := range are {
		if errors.Is(err, e) {
			return nil
		}
	}
	return err
}
