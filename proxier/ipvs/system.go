// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"fmt"

	mobyipvs "github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/kernel/netns"
)

// kernelSystem is a network namespace of the kernel.
type kernelSystem struct {
	opts    *Options
	netns   netns.Namespace
	nl      *netlink.Handle
	servers *kernelServers
	device  *device
	sets    *ipsets
	told    map[string]bool // of settings that cannot be changed
}

// openSystem opens that of the calling thread.
func openSystem(opts *Options) (s *kernelSystem, err error) {
	s = &kernelSystem{opts: opts, told: map[string]bool{}}
	defer func() {
		if err != nil {
			_ = s.close()
		}
	}()
	if s.servers, err = openServers(); err != nil {
		return s, err
	}
	if s.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER); err != nil {
		return s, fmt.Errorf("open netlink: %w", err)
	}
	s.device = &device{nl: s.nl}
	if s.sets, err = openSets(s.nl); err != nil {
		return s, err
	}
	s.netns, err = netns.Own()
	return s, err
}

func (s *kernelSystem) prepare(ctx context.Context) error {
	if err := errors.Join(s.device.ensure(), s.sets.ensure()); err != nil {
		return err
	}
	if err := s.setTimeouts(); err != nil {
		return err
	}
	return s.netns.Do(func() error {
		s.configure(ctx)
		return nil
	})
}

// setTimeouts leaves those alone that are 0, as the kernel does.
func (s *kernelSystem) setTimeouts() error {
	c := mobyipvs.Config{TimeoutTCP: s.opts.TCPTimeout, TimeoutTCPFin: s.opts.TCPFinTimeout, TimeoutUDP: s.opts.UDPTimeout}
	if c == (mobyipvs.Config{}) {
		return nil
	}
	if err := s.servers.handle.SetConfig(&c); err != nil {
		return fmt.Errorf("set timeouts of IPVS: %w", err)
	}
	return nil
}

func (s *kernelSystem) serving(ctx context.Context) (serving bool, err error) {
	err = s.netns.Do(func() error {
		for _, f := range s.sets.families {
			table, err := s.opts.Tools.Save(ctx, f, "nat")
			if err != nil {
				return err
			}
			c := table.Chain("KUBE-SERVICES")
			serving = serving || c != nil && len(c.Rules) > 0
		}
		return nil
	})
	return serving, err
}

func (s *kernelSystem) close() error {
	if s.servers != nil {
		s.servers.Close()
	}
	if s.nl != nil {
		s.nl.Close()
	}
	if s.sets != nil {
		s.sets.close()
	}
	return s.netns.Close()
}
