// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// maxIndex is the highest node, pod or client number; the addresses above it in
// the last octet belong to gateways.
const maxIndex = 250

// Options shape a lab. The zero value is the usual lab.
type Options struct {
	// MTU of every link; 1500 if zero.
	MTU int
	// Pause starts a process that only sleeps in every node and pod, like the
	// pause container of a real pod. Code that looks for namespaces under /proc
	// finds the lab's only with it: Sandbox threads show up below
	// /proc/<pid>/task alone.
	Pause bool
	// Nodes is how nodes are set up; Node.Set changes it for one.
	Nodes NodeSettings
	// NoOffload has senders compute checksums and cut segments, as behind devices
	// that cannot. Otherwise a packet crosses the lab without either, and nobody
	// notices a wrong checksum.
	NoOffload bool
	// PortsInTurn has clients take one source port after the other, each at first for one
	// connection alone. The kernel takes one for several that go to different addresses,
	// and virtual servers mix up the replies of those to one endpoint.
	PortsInTurn bool
}

// Lab is a set of nodes, pods and clients joined by a fabric.
type Lab struct {
	opts   Options
	fail   func(error) // how Node, Pod and Client report failure
	cgroup string
	fabric *Sandbox

	mu      sync.Mutex // guards all fields below, and topology changes
	closed  bool
	nodes   []*Node
	clients []*Client
	nextN   int
	nextC   int

	announced map[netip.Prefix][]*Node
}

// New opens a lab. It needs root and a writable cgroup2 mount; Available tells
// beforehand. Close removes everything; on an interrupt the caller has to see to
// it that Close runs.
func New(opts Options) (*Lab, error) {
	if os.Getenv(helperEnv) != "" {
		// A helper that comes here runs the whole program again, and would
		// go on to start helpers of its own.
		return nil, errors.New("open lab: this is a helper process whose main function did not call lab.Main")
	}
	if err := errors.Join(Available(), opts.Nodes.Available()); err != nil {
		return nil, fmt.Errorf("open lab: %w", err)
	}
	if opts.MTU == 0 {
		opts.MTU = 1500
	}
	// Best effort: somebody else's leftovers are no reason not to start.
	_ = Sweep()

	cgroup, err := openLabCgroup()
	if err != nil {
		return nil, fmt.Errorf("open lab: %w", err)
	}
	l := &Lab{
		opts: opts, cgroup: cgroup, fail: func(err error) { panic(err) },
		announced: map[netip.Prefix][]*Node{},
	}
	if err := l.openFabric(); err != nil {
		return nil, errors.Join(fmt.Errorf("open lab: %w", err), l.Close())
	}
	return l, nil
}

// WithoutRootEnv makes tests that need root behave as for somebody else: they are skipped. Runs of
// what needs no root say the same on every machine so.
const WithoutRootEnv = "TANDEM_WITHOUT_ROOT"

// Root says why tests cannot do what takes root; nil if they can.
func Root() error {
	if os.Getenv(WithoutRootEnv) == "1" || os.Geteuid() != 0 {
		return errors.New("root (for network namespaces, cgroups and BPF)")
	}
	return nil
}

// Available returns nil if a lab can be opened here, or the reason why not.
func Available() error {
	if err := Root(); err != nil {
		return err
	}
	mount, _, err := cgroupMount()
	if err != nil {
		return err
	}
	if err := unix.Access(mount, unix.W_OK); err != nil {
		return fmt.Errorf("cgroup2 at %s is not writable: %w", mount, err)
	}
	return nil
}

// Close ends all processes and threads of the lab and removes its namespaces,
// links and cgroups. Sockets that were made in the lab and are still open keep
// their namespace alive, and nothing else. Close is idempotent.
func (l *Lab) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true

	var errs []error
	for _, n := range l.nodes {
		for _, p := range n.pods {
			errs = append(errs, p.shut())
		}
		errs = append(errs, n.shut())
	}
	for _, c := range l.clients {
		errs = append(errs, c.shut())
	}
	if l.fabric != nil {
		errs = append(errs, l.fabric.shut())
	}
	errs = append(errs, killTree(l.cgroup), closeLabCgroup(l.cgroup))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close lab: %w", err)
	}
	return nil
}

// Fabric is the namespace that joins nodes and clients: a bridge for the
// nodes' subnet, and the router of everything else.
func (l *Lab) Fabric() *Sandbox { return l.fabric }

// Nodes returns the open nodes, oldest first.
func (l *Lab) Nodes() []*Node {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]*Node(nil), l.nodes...)
}

// Announce makes the fabric deliver a prefix to the given nodes, as a BGP or ARP
// speaker of a load balancer would; several nodes share the flows. Without
// nodes the prefix goes back to being dropped.
func (l *Lab) Announce(prefix netip.Prefix, nodes ...*Node) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return ErrClosed
	}
	l.announced[prefix] = nodes
	return l.announce(prefix)
}

func (l *Lab) announce(prefix netip.Prefix) error {
	route := &netlink.Route{Dst: ipNet(prefix)}
	nodes := l.announced[prefix]
	if len(nodes) == 0 {
		err := l.fabric.nl.RouteDel(route)
		if errors.Is(err, unix.ESRCH) {
			err = nil
		}
		return wrap(err, "withdraw %s", prefix)
	}
	for _, n := range nodes {
		route.MultiPath = append(route.MultiPath, &netlink.NexthopInfo{Gw: n.addr(prefix.Addr().Is4()).AsSlice()})
		*route = n.limited(*route)
	}
	return wrap(l.fabric.nl.RouteReplace(route), "announce %s", prefix)
}

// wrap adds the step to an error, if there is one.
func wrap(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}
