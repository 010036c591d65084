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
	// pause container of a real pod. Code that searches /proc for namespaces needs it:
	// sandbox threads appear only in /proc/<pid>/task.
	Pause bool
	// Nodes are the settings of all nodes; Node.Set changes those of one node.
	Nodes NodeSettings
	// NoOffload turns off checksum and segmentation offload. With offload, packets cross
	// the lab without valid checksums, and wrong checksums remain undetected.
	NoOffload bool
	// XDP lets the fabric receive what XDP programs send back on uplinks of nodes.
	XDP bool
	// PortsInTurn makes clients use consecutive source ports, without reuse until the
	// range ends. The kernel may use one source port for connections to different
	// addresses; if virtual servers send these to the same endpoint, IPVS mixes up the
	// replies, and direct server return by IP options resets the later one.
	PortsInTurn bool
	// Unattached pods have no link, only the address of the plan: the caller attaches them,
	// as Connect or a CNI plugin does.
	Unattached bool
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
	domains []string // cgroups that Domain made

	announced map[netip.Prefix][]*Node
}

// New opens a lab. It needs root and a writable cgroup2 mount; Available checks for
// both. Close removes everything; the caller must also call it on an interrupt.
func New(opts Options) (*Lab, error) {
	if os.Getenv(HelperEnv) != "" {
		// A helper process must not run the program itself: it would start more
		// helpers.
		return nil, errors.New("open lab: this is a helper process whose main function did not call lab.Main")
	}
	if err := errors.Join(Available(), opts.Nodes.Available()); err != nil {
		return nil, fmt.Errorf("open lab: %w", err)
	}
	if opts.MTU == 0 {
		opts.MTU = 1500
	}
	// Best effort: leftovers of other processes do not prevent a new lab.
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

// WithoutRootEnv, if 1, skips tests that need root even for root, so that results do not depend
// on the user.
const WithoutRootEnv = "TANDEM_WITHOUT_ROOT"

// Root returns nil if tests may use root privileges, or the reason why not.
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
	for _, path := range l.domains {
		errs = append(errs, RemoveCgroup(path))
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
