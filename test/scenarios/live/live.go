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
	// Start begins the life of a process on a node. The end of it leaves what
	// is in the kernel.
	Start(node *lab.Node) (tier proxier.Tier, end func(), err error)
	// Carries says why the tier cannot do with a flow what was decided; nil if
	// it can.
	Carries(e *proxier.Explanation) error
}

// Program is a kube-proxy of its own in place of tiers.
type Program interface {
	// Start returns when it serves all objects that there are.
	Start(ctx context.Context, node *lab.Node, config *scenarios.Config, objects []metav1.Object) (Proxy, error)
}

// Proxy is what runs on a node.
type Proxy interface {
	// Apply returns when it has taken changes in.
	Apply(ctx context.Context, changes []scenarios.ObjectChange) error
	// Learn tells it of another address of the node, or of ServiceCIDRs.
	Learn(ctx context.Context) error
	// End leaves what is in the kernel.
	End()
}

// Captor is a Tier that does something to calls that no node should have to do with.
type Captor interface {
	// Captures says what; nil if it lets the call pass.
	Captures(p scenarios.Probe) error
}

// Confuser is a Tier whose kernel may take the replies to one connection for another's.
type Confuser interface {
	// Confused says with which a call that nobody answered was confused; nothing if it was
	// not, or if it is known.
	Confused(p scenarios.Probe) (with string, err error)
}

// Guarded are nodes that let pass no more than clusters have to: whatever a tier does
// with packets beside the kernel's own ways, these notice.
var Guarded = lab.NodeSettings{Conntrack: true, ForwardDrop: true, DropInvalid: true, StrictSource: true}

// Play plays a scenario, as far as the tier carries it. Options shape the lab.
func Play(t *testing.T, s *scenarios.Scenario, tier Tier, opts ...lab.Options) {
	t.Helper()
	c := newCluster(t, s, opts)
	c.opts.Pause = true // pods show in /proc
	c.carrier = tier
	c.start = func(ctx context.Context, n *lab.Node) (Proxy, error) { return c.startTier(ctx, n, tier) }
	scenarios.Run(t, s, c)
}

// PlayProgram plays a scenario with a program. Calls that are answered are repeated until
// all who answer are known, whatever the scenario expects.
func PlayProgram(t testing.TB, s *scenarios.Scenario, p Program) {
	t.Helper()
	c := newCluster(t, s, nil)
	c.curious = true
	c.carrier = everything{}
	c.start = func(ctx context.Context, n *lab.Node) (Proxy, error) { return c.startProgram(ctx, n, p) }
	scenarios.Run(t, s, c)
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

// PlayAll plays several at a time: what takes long is that the kernel waits for its
// own, and tests for silence. In short mode it plays one for each statement, and of those
// what the kernel was dealt.
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

// oneOfEach has one staging of those whose names begin with the same statement: of the first
// statement the first, of the second the second, so that each way of staging is among them.
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

// silence is how long a call waits where nobody is expected to answer, patience
// where somebody is.
const silence = 300 * time.Millisecond

var patience = max(5*time.Second, lab.RequestTimeout())

// manyTries meet all of the few endpoints that a scenario has, as good as certainly.
const manyTries = 48

// cluster is a scenarios.Cluster. The model beside it tells the facts of nodes
// and the way that packets take, and what the tables say is as well known
// there.
type cluster struct {
	t        testing.TB
	scenario *scenarios.Scenario
	start    func(context.Context, *lab.Node) (Proxy, error)
	carrier  carrier
	curious  bool
	model    *scenarios.Model
	opts     lab.Options
	lab      *lab.Lab
	config   scenarios.Config
	nodes    map[string]*node
	boxes    map[string]*lab.Sandbox // of nodes, pods and clients
	flows    map[string]net.Conn
	// announced are the prefixes that the network leads to nodes.
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
	// One that was applied comes later, and counts.
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
			// Without it, calls say what is missing.
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

// Apply hands objects to all proxies.
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

// Announce leads a prefix to nodes.
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

// lead has the network lead an address to a node until undo is called.
func (c *cluster) lead(to netip.Addr, node string) (undo func() error, err error) {
	only := netip.PrefixFrom(to, to.BitLen())
	undo = func() error { return c.lab.Announce(only, c.announced[only]...) }
	return undo, c.lab.Announce(only, c.nodes[node].at)
}

// Address gives a node's device an address, or takes it away.
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

// Reach calls.
func (c *cluster) Reach(ctx context.Context, p scenarios.Probe) (o scenarios.Observation, err error) {
	if err := carries(c.model, c.carrier, p); err != nil {
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
			o.Answers = append(o.Answers, scenarios.Answer{Server: reply.Server, Source: reply.Peer.Addr()})
			if c.curious && p.Flow == "" {
				tries = max(tries, manyTries)
			}
			continue
		}
		f, known := failureOf(err)
		if !known {
			return o, err
		}
		if again, err := c.confused(p, f); err != nil {
			return o, err
		} else if again {
			tries++
			continue
		}
		o.Failures = append(o.Failures, f)
		if f == scenarios.TimedOut && !p.Silent {
			break // it is wrong already, and the others would take as long
		}
	}
	return o, nil
}

// confused says whether a call is to be repeated, as the kernel confused it with another.
func (c *cluster) confused(p scenarios.Probe, f scenarios.Failure) (bool, error) {
	tier, ok := c.carrier.(Confuser)
	if !ok || f != scenarios.TimedOut || p.Silent || p.Flow != "" {
		return false, nil
	}
	with, err := tier.Confused(p)
	if with != "" {
		c.t.Logf("a call of %s to %s was confused with %s", p.From, p.To, with)
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
		// A process that was forked when the last one was closed has a copy of that
		// until it runs another program.
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

// Carried counts the calls of a scenario that this kernel can make, and those of them
// that the tier carries.
func Carried(t *testing.T, s *scenarios.Scenario, tier Tier) (carried, all int) {
	t.Helper()
	c := &counter{Model: scenarios.NewModel(s), tier: tier}
	scenarios.Run(t, s, c)
	return c.carried, c.all
}

type counter struct {
	*scenarios.Model
	tier         Tier
	carried, all int
}

func (c *counter) Reach(ctx context.Context, p scenarios.Probe) (scenarios.Observation, error) {
	if missing(p) != nil {
		return c.Model.Reach(ctx, p)
	}
	c.all++
	if err := carries(c.Model, c.tier, p); err == nil {
		c.carried++
	}
	return c.Model.Reach(ctx, p)
}

// missing says what the kernel lacks for a call.
func missing(p scenarios.Probe) error {
	if p.Protocol == proxier.SCTP {
		return lab.SCTPAvailable()
	}
	return nil
}

// carrier says why it does not carry a call; nil if it does.
type carrier interface {
	Carries(*proxier.Explanation) error
}

// everything is what a proxy of its own has to carry.
type everything struct{}

func (everything) Carries(*proxier.Explanation) error { return nil }

// carries says why a call cannot be made.
func carries(m *scenarios.Model, by carrier, p scenarios.Probe) error {
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
	if c, ok := by.(Captor); ok && len(explained) == 0 {
		if err := c.Captures(p); err != nil {
			return fmt.Errorf("%w: %w", err, errors.ErrUnsupported)
		}
	}
	for i := range explained {
		if err := by.Carries(&explained[i]); err != nil {
			return fmt.Errorf("%w: %w", err, errors.ErrUnsupported)
		}
	}
	return nil
}
