// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package live plays scenarios on real traffic: nodes, pods and clients of a
// lab, and on every node a proxier with the tier under test.
package live

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
	"github.com/tandem-proxy/tandem/test/scenarios"
)

// Tier is what a scenario tests.
type Tier interface {
	// Start starts the tier on a node, as in a new process. Its end leaves the kernel
	// state in place.
	Start(node *lab.Node) (tier proxier.Tier, end func(), err error)
	// Serves returns nil if the tier can serve a flow as decided, or the reason why
	// not.
	Serves(e *proxier.Explanation) error
}

// Program is another kube-proxy, which is tested instead of a tier. It may have the method Serves of
// a Tier; otherwise it serves all calls. It may have a method Network, which returns the options of the lab.
type Program interface {
	// Start returns when it serves all given objects.
	Start(ctx context.Context, node *lab.Node, config *scenarios.Config, objects []metav1.Object) (Proxy, error)
}

// Proxy is a running proxy on a node.
type Proxy interface {
	// Apply returns when the proxy serves the changed objects.
	Apply(ctx context.Context, changes []scenarios.ObjectChange) error
	// Learn returns when the proxy knows the node's current addresses and the ServiceCIDRs.
	Learn(ctx context.Context) error
	// End ends the proxy and leaves its kernel state in place.
	End()
}

// Interceptor is a Tier that affects calls which no proxy should handle.
type Interceptor interface {
	// Intercepts returns how the tier affects a call; nil if it lets the call pass.
	Intercepts(p scenarios.Probe) error
}

// CollisionFinder is a Tier whose kernel may mistake the replies of one connection for those of
// another one.
type CollisionFinder interface {
	// Collision returns the connection that collides with a call without an answer; empty if
	// there is none, or if it was returned before.
	Collision(p scenarios.Probe) (with string, err error)
}

// DirectTier is a Tier with direct server return, or without it by Services alone: endpoints see clients outside in place of the node at which
// their packets arrived.
type DirectTier interface {
	Forwarding() proxier.Forwarding
}

// Guarded are strict node settings: they drop packets that a tier forwards in ways which
// netfilter or routing do not expect.
var Guarded = lab.NodeSettings{Conntrack: true, ForwardDrop: true, DropInvalid: true, StrictSource: true}

// Play plays a scenario, except for calls that the tier does not serve. Options are those of the
// lab.
func Play(t *testing.T, s *scenarios.Scenario, tier Tier, opts ...lab.Options) {
	t.Helper()
	c := newCluster(t, s, opts)
	c.opts.Pause = true // pods show in /proc
	c.scope = tier
	c.start = func(ctx context.Context, n *lab.Node) (Proxy, error) { return c.startTier(ctx, n, tier) }
	scenarios.Run(t, s, c)
}

// PlayProgram plays a scenario with a program. It repeats answered calls until all backends
// are known, even if the scenario does not expect any.
func PlayProgram(t testing.TB, s *scenarios.Scenario, p Program) {
	t.Helper()
	PlayProgramThen(t, s, p, func() {})
}

// PlayProgramThen is PlayProgram, and calls a function at the end, while the nodes are still there.
func PlayProgramThen(t testing.TB, s *scenarios.Scenario, p Program, then func()) {
	t.Helper()
	c := newCluster(t, s, nil)
	if n, ok := p.(interface{ Network() lab.Options }); ok {
		c.opts = n.Network()
	}
	c.exhaustive = true
	c.scope = everything{}
	if s, ok := p.(scope); ok {
		c.scope = s
		c.opts.Pause = true
	}
	c.start = func(ctx context.Context, n *lab.Node) (Proxy, error) { return c.startProgram(ctx, n, p) }
	scenarios.Run(t, s, c)
	then()
}

func newCluster(t testing.TB, s *scenarios.Scenario, opts []lab.Options) *cluster {
	c := &cluster{
		t: t, scenario: s, model: scenarios.NewModel(s),
		nodes: map[string]*node{}, boxes: map[string]*lab.Sandbox{}, flows: map[string]net.Conn{}, announced: map[netip.Prefix][]*lab.Node{},
	}
	if len(opts) > 0 {
		c.opts = opts[0]
	}
	return c
}

// Staging is one way to play a scenario.
type Staging struct {
	Name     string
	Scenario *scenarios.Scenario
	Tier     func(*testing.T) Tier
	Network  lab.Options
}

// PlayAll plays several scenarios at a time, as most of their time is waiting: for the kernel,
// and for timeouts. In short mode it plays one for each statement, and of those only the
// kernel's share (see package kernel).
func PlayAll(t *testing.T, list []Staging) {
	t.Helper()
	if testing.Short() {
		list = oneOfEach(list)
	}
	const players = 4
	next := make(chan Staging)
	var wg sync.WaitGroup
	for range players {
		wg.Go(func() {
			for s := range next {
				t.Run(s.Name, func(t *testing.T) { Play(t, s.Scenario, s.Tier(t), s.Network) })
			}
		})
	}
	for i, s := range list {
		if kernel.Dealt(i) {
			next <- s
		}
	}
	close(next)
	wg.Wait()
}

// oneOfEach selects one staging per statement, which is the beginning of the name: the first one
// for the first statement, the second one for the second, and so on, so that each kind of
// staging is included.
func oneOfEach(list []Staging) (some []Staging) {
	statements, by := []string{}, map[string][]Staging{}
	for _, s := range list {
		name, _, _ := strings.Cut(s.Name, "-")
		if by[name] == nil {
			statements = append(statements, name)
		}
		by[name] = append(by[name], s)
	}
	for i, name := range statements {
		some = append(some, by[name][i%len(by[name])])
	}
	return some
}

// silence is the timeout of calls if no answer is expected, patience if one is.
const silence = 300 * time.Millisecond

var patience = max(5*time.Second, lab.RequestTimeout())

// manyTries suffice to reach all of a scenario's few endpoints almost certainly.
const manyTries = 48

// cluster is a scenarios.Cluster. It plays all events on a model as well, which knows
// the facts of nodes and the paths of packets. Only the model checks tables.
type cluster struct {
	t          testing.TB
	scenario   *scenarios.Scenario
	start      func(context.Context, *lab.Node) (Proxy, error)
	scope      scope
	exhaustive bool
	model      *scenarios.Model
	opts       lab.Options
	lab        *lab.Lab
	config     scenarios.Config
	nodes      map[string]*node
	boxes      map[string]*lab.Sandbox // of nodes, pods and clients
	flows      map[string]net.Conn
	// announced are the prefixes that the network routes to nodes.
	announced map[netip.Prefix][]*lab.Node
}

type node struct {
	at    *lab.Node
	proxy Proxy // nil before the first
}

// tierProxy is a proxier with a tier.
type tierProxy struct {
	*proxier.Proxier
	node  string
	facts func(node string) proxier.Facts
	end   func()
}

func (p *tierProxy) End() { p.end() }

func (p *tierProxy) Apply(ctx context.Context, changes []scenarios.ObjectChange) error {
	for _, change := range changes {
		scenarios.Feed(p.Proxier, p.node, change)
	}
	return p.Sync(ctx)
}

func (p *tierProxy) Learn(ctx context.Context) error {
	p.UpdateFacts(func(f *proxier.Facts) { *f = p.facts(p.node) })
	return p.Sync(ctx)
}

func (c *cluster) startTier(ctx context.Context, at *lab.Node, t Tier) (Proxy, error) {
	tier, end, err := t.Start(at)
	if err != nil {
		return nil, err
	}
	p := &tierProxy{node: at.Name, facts: c.model.Facts, end: end}
	policy, err := c.config.Policy()
	if err != nil {
		return p, err
	}
	if direct, ok := t.(DirectTier); ok {
		policy.Forwarding = direct.Forwarding()
	}
	p.Proxier, err = proxier.New(proxier.Options{
		NodeName: at.Name, Facts: c.model.Facts(at.Name), Policy: policy, Tier: tier, NodeFacts: c.model.NodeFacts(at.Name),
	})
	if err != nil {
		return p, err
	}
	for _, o := range c.model.Objects() {
		scenarios.Feed(p.Proxier, at.Name, scenarios.ObjectChange{New: o})
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	return p, p.Sync(ctx)
}

func (c *cluster) startProgram(ctx context.Context, at *lab.Node, p Program) (Proxy, error) {
	declared, err := c.scenario.NodeObject(at.Name)
	if err != nil {
		return nil, err
	}
	// An applied Node follows it and replaces it.
	return p.Start(ctx, at, &c.config, append([]metav1.Object{declared}, c.model.Objects()...))
}

// Configure builds the cluster the first time.
func (c *cluster) Configure(ctx context.Context, config scenarios.Config) error {
	if err := c.model.Configure(ctx, config); err != nil {
		return err
	}
	first := c.lab == nil
	if first {
		if err := c.build(); err != nil {
			return err
		}
	}
	same := !first && c.config.SameProcess(config)
	c.config = config
	for _, n := range c.scenario.Nodes {
		var err error
		if same {
			err = c.nodes[n.Name].proxy.Learn(ctx)
		} else {
			err = c.Restart(ctx, n.Name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *cluster) build() error {
	c.lab = lab.NewT(c.t, c.opts)
	for _, n := range c.scenario.Nodes {
		at := c.lab.Node(n.Name)
		c.nodes[n.Name], c.boxes[n.Name] = &node{at: at}, at.Sandbox
	}
	for _, p := range c.scenario.Pods {
		c.boxes[p.Name] = c.nodes[p.Node].at.Pod(p.Name).Sandbox
	}
	for _, name := range c.scenario.Clients {
		c.boxes[name] = c.lab.Client(name).Sandbox
	}
	listeners, err := c.scenario.Listeners()
	if err != nil {
		return err
	}
	for _, l := range listeners {
		box := c.boxes[l.Name]
		switch l.Protocol {
		case proxier.TCP:
			_, err = box.ServeTCP(l.Port)
		case proxier.UDP:
			_, err = box.ServeUDP(l.Port)
		case proxier.SCTP:
			// Without SCTP, calls return what is missing.
			if lab.SCTPAvailable() == nil {
				_, err = box.ServeSCTP(l.Port)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Restart ends a node's process and starts another one.
func (c *cluster) Restart(ctx context.Context, name string) error {
	if err := c.model.Restart(ctx, name); err != nil {
		return err
	}
	n := c.nodes[name]
	if n.proxy != nil {
		n.proxy.End()
	}
	var err error
	n.proxy, err = c.start(ctx, n.at)
	return err
}

// Apply passes changed objects to all proxies.
func (c *cluster) Apply(ctx context.Context, changes []scenarios.ObjectChange) error {
	if err := c.model.Apply(ctx, changes); err != nil {
		return err
	}
	for _, n := range c.nodes {
		if err := n.proxy.Apply(ctx, changes); err != nil {
			return err
		}
	}
	return nil
}

// Announce routes a prefix to nodes.
func (c *cluster) Announce(ctx context.Context, prefix netip.Prefix, nodes []string) error {
	if err := c.model.Announce(ctx, prefix, nodes); err != nil {
		return err
	}
	to := make([]*lab.Node, len(nodes))
	for i, name := range nodes {
		to[i] = c.nodes[name].at
	}
	c.announced[prefix] = to
	return c.lab.Announce(prefix, to...)
}

// lead routes an address to a node until undo is called.
func (c *cluster) lead(to netip.Addr, node string) (undo func() error, err error) {
	only := netip.PrefixFrom(to, to.BitLen())
	undo = func() error { return c.lab.Announce(only, c.announced[only]...) }
	return undo, c.lab.Announce(only, c.nodes[node].at)
}

// Address adds an address to a node's device, or removes it.
func (c *cluster) Address(ctx context.Context, name string, addr netip.Addr, gone bool) error {
	if err := c.model.Address(ctx, name, addr, gone); err != nil {
		return err
	}
	nl := c.nodes[name].at.Netlink()
	link, err := nl.LinkByName("eth0")
	if err != nil {
		return err
	}
	a := &netlink.Addr{IPNet: netlink.NewIPNet(addr.AsSlice()), Flags: unix.IFA_F_NODAD}
	if gone {
		err = nl.AddrDel(link, a)
	} else {
		err = nl.AddrAdd(link, a)
	}
	return errors.Join(err, c.nodes[name].proxy.Learn(ctx))
}

// Override is what an operator says of a backend.
func (c *cluster) Override(ctx context.Context, name string, o proxier.BackendOverride) error {
	p, ours := c.nodes[name].proxy.(*tierProxy)
	if !ours {
		return fmt.Errorf("%w: commands of operators", errors.ErrUnsupported)
	}
	return errors.Join(c.model.Override(ctx, name, o), p.Learn(ctx))
}

// Reach makes the calls of a probe.
func (c *cluster) Reach(ctx context.Context, p scenarios.Probe) (o scenarios.Observation, err error) {
	if err := check(c.model, c.scope, p); err != nil {
		return o, err
	}
	if p.Via != "" {
		undo, err := c.lead(p.To.Addr(), p.Via)
		if err != nil {
			return o, err
		}
		defer func() { err = errors.Join(err, undo()) }()
	}
	tries := p.Tries
	for i := 0; i < tries; i++ {
		reply, err := c.ask(ctx, p)
		if err == nil {
			o.Answers = append(o.Answers, scenarios.Answer{Server: reply.Server, Source: c.sourceOf(p, &reply)})
			if c.exhaustive && p.Flow == "" {
				tries = max(tries, manyTries)
			}
			continue
		}
		f, known := failureOf(err)
		if !known {
			return o, err
		}
		if again, err := c.collided(p, f); err != nil {
			return o, err
		} else if again {
			tries++
			continue
		}
		o.Failures = append(o.Failures, f)
		if f == scenarios.TimedOut && !p.Silent {
			break // the scenario has failed already, and other calls may also time out
		}
	}
	return o, nil
}

// sourceOf is the address that an endpoint saw. With direct server return, one on another node than that at which the packets of a
// client outside arrive sees the client, and scenarios expect that node.
func (c *cluster) sourceOf(p scenarios.Probe, reply *lab.Reply) netip.Addr {
	saw, s := reply.Peer.Addr(), c.scenario
	family := proxier.FamilyOf(saw)
	if _, ok := c.scope.(DirectTier); !ok || s.NodeOf(p.From) != "" || saw != s.Addr(p.From, family) {
		return saw
	}
	var arrives []string
	for prefix, nodes := range c.announced {
		if prefix.Contains(p.To.Addr()) {
			for _, n := range nodes {
				arrives = append(arrives, n.Name)
			}
		}
	}
	for _, n := range s.Nodes {
		if s.Addr(n.Name, family) == p.To.Addr() {
			arrives = append(arrives, n.Name)
		}
	}
	if p.Via != "" {
		arrives = []string{p.Via}
	}
	for _, name := range arrives {
		if s.NodeOf(reply.Server) != name {
			return s.Addr(name, family)
		}
	}
	return saw
}

// collided reports whether a call must be repeated because it collided with another connection.
func (c *cluster) collided(p scenarios.Probe, f scenarios.Failure) (bool, error) {
	tier, ok := c.scope.(CollisionFinder)
	if !ok || f != scenarios.TimedOut || p.Silent || p.Flow != "" {
		return false, nil
	}
	with, err := tier.Collision(p)
	if with != "" {
		c.t.Logf("a call of %s to %s collided with %s", p.From, p.To, with)
	}
	return with != "", err
}

func (c *cluster) ask(ctx context.Context, p scenarios.Probe) (reply lab.Reply, err error) {
	wait := patience
	if p.Silent {
		wait = silence
	}
	network := strings.ToLower(p.Protocol.String())
	within := func(do func(context.Context) error) error {
		ctx, cancel := context.WithTimeout(ctx, wait)
		defer cancel()
		return do(ctx)
	}
	box := c.boxes[p.From]
	if p.Flow == "" {
		err = within(func(ctx context.Context) error {
			reply, err = box.Ask(ctx, network, p.To)
			return err
		})
		return reply, err
	}
	var port uint16
	conn := c.flows[p.Flow]
	if conn != nil {
		err = within(func(ctx context.Context) error {
			reply, err = lab.AskConn(ctx, conn)
			return err
		})
		if err == nil || network != "udp" {
			return reply, err
		}
		port = conn.LocalAddr().(*net.UDPAddr).AddrPort().Port()
		_ = conn.Close()
	}
	err = within(func(ctx context.Context) error {
		// A process that is being forked has a copy of the closed socket until it
		// executes its program.
		for conn, err = box.DialFrom(ctx, network, port, p.To); errors.Is(err, unix.EADDRINUSE) && ctx.Err() == nil; {
			conn, err = box.DialFrom(ctx, network, port, p.To)
		}
		if err != nil {
			return err
		}
		c.flows[p.Flow] = conn
		c.t.Cleanup(func() { _ = conn.Close() })
		reply, err = lab.AskConn(ctx, conn)
		return err
	})
	return reply, err
}

func failureOf(err error) (f scenarios.Failure, known bool) {
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		return scenarios.ConnectionRefused, true
	case errors.Is(err, unix.EPERM):
		return scenarios.NotPermitted, true
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
		return scenarios.Unreachable, true
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), errors.Is(err, unix.ETIMEDOUT):
		return scenarios.TimedOut, true
	}
	return 0, false
}

// CountServed counts the calls of a scenario that this kernel can make, and those of them
// that the tier serves.
func CountServed(t *testing.T, s *scenarios.Scenario, tier Tier) (served, all int) {
	t.Helper()
	c := &counter{Model: scenarios.NewModel(s), tier: tier}
	scenarios.Run(t, s, c)
	return c.served, c.all
}

type counter struct {
	*scenarios.Model
	tier        Tier
	served, all int
}

func (c *counter) Reach(ctx context.Context, p scenarios.Probe) (scenarios.Observation, error) {
	if missing(p) != nil {
		return c.Model.Reach(ctx, p)
	}
	c.all++
	if err := check(c.Model, c.tier, p); err == nil {
		c.served++
	}
	return c.Model.Reach(ctx, p)
}

// missing returns what the kernel lacks for a call; nil for nothing.
func missing(p scenarios.Probe) error {
	if p.Protocol == proxier.SCTP {
		return lab.SCTPAvailable()
	}
	return nil
}

// SocketsCannot returns what a flow asks for that programs at sockets cannot do; nil for nothing.
func SocketsCannot(e *proxier.Explanation) error {
	switch {
	case e.Flow.Device != lab.Uplink && e.Flow.Device != "" && e.Origin != proxier.FromPod && e.Outcome != proxier.Pass:
		return errors.New("socket programs treat every pod as one, even if detectLocal does not")
	case e.Flow.Device != lab.Uplink && e.Frontend != nil && e.Route.Source == proxier.Masquerade && e.Origin == proxier.FromPod:
		return errors.New("socket programs do not masquerade pods")
	}
	return nil
}

// scope decides which calls are made; see Tier.
type scope interface {
	Serves(*proxier.Explanation) error
}

// everything is the scope of a Program.
type everything struct{}

func (everything) Serves(*proxier.Explanation) error { return nil }

// check returns why a call cannot be made; nil if it can.
func check(m *scenarios.Model, by scope, p scenarios.Probe) error {
	if err := missing(p); err != nil {
		if os.Getenv(lab.RequireModulesEnv) == "1" {
			return fmt.Errorf("missing, although %s=1: %w", lab.RequireModulesEnv, err)
		}
		return fmt.Errorf("%w: %w", err, errors.ErrUnsupported)
	}
	explained, err := m.Explain(p)
	if err != nil {
		return err
	}
	if c, ok := by.(Interceptor); ok && len(explained) == 0 {
		if err := c.Intercepts(p); err != nil {
			return fmt.Errorf("%w: %w", err, errors.ErrUnsupported)
		}
	}
	for i := range explained {
		if err := by.Serves(&explained[i]); err != nil {
			return fmt.Errorf("%w: %w", err, errors.ErrUnsupported)
		}
	}
	return nil
}
