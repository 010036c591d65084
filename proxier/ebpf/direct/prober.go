// SPDX-License-Identifier: Apache-2.0

package direct

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/kernel/packetsocket"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

const (
	// Interval is the time between two probes of an address, and LostAfter how many of them in a row are not answered until its
	// node does not count any more.
	Interval  = 2 * time.Second
	LostAfter = 3
	// perProbe bounds how many probes are sent in a second.
	perProbe = time.Millisecond
	// settle is how long answers are collected before they count.
	settle = 20 * time.Millisecond
)

// Options of a Prober.
type Options struct {
	// Netns is the network namespace of the node.
	Netns netns.Namespace
	// Dispatch is in what form probes are sent, as packets of clients are then.
	Dispatch lbmap.Dispatch
	// Sources are prefixes, one of a family, that IP in IP comes from.
	Sources []netip.Prefix
	// Peers returns the addresses to probe.
	Peers func() []netip.Addr
	// Ready is told the addresses that answer, each time that changes.
	Ready func(map[netip.Addr]struct{})
}

// Prober probes backends.
type Prober struct {
	opts Options
	wake chan struct{}

	mu     sync.Mutex
	counts Counts
}

// Counts are how many addresses are probed, and how many of them answer.
type Counts struct{ Peers, Ready int }

// New makes a Prober.
func New(o Options) *Prober { return &Prober{opts: o, wake: make(chan struct{}, 1)} }

// Wake has new peers probed at once.
func (p *Prober) Wake() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Counts are those of the last round.
func (p *Prober) Counts() Counts {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.counts
}

// Run probes until ctx is done. Nothing is opened while there are no peers.
func (p *Prober) Run(ctx context.Context) {
	logger := klog.FromContext(ctx)
	for ctx.Err() == nil {
		if len(p.opts.Peers()) > 0 {
			if err := p.probe(ctx); err != nil && ctx.Err() == nil {
				logger.Error(err, "Cannot probe which nodes take direct server return; clients of new connections are masqueraded", "retryIn", Interval)
				p.opts.Ready(nil)
			}
		}
		p.pause(ctx, Interval)
	}
}

// pause waits until there may be new peers, and at most for a time.
func (p *Prober) pause(ctx context.Context, atMost time.Duration) {
	timer := time.NewTimer(atMost)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-p.wake:
	}
}

// probe opens sockets, and probes until there are no peers any more.
func (p *Prober) probe(ctx context.Context) error {
	identity := probe{id: uint16(rand.Uint32()), cookie: rand.Uint64(), dispatch: p.opts.Dispatch, sources: p.opts.Sources}
	filter, err := newFilter(identity.id)
	if err != nil {
		return err
	}
	defer filter.Close()
	var send *sender
	var listeners []*packetsocket.Listener
	err = p.opts.Netns.Do(func() (err error) {
		if send, err = newSender(); err == nil {
			listeners, err = packetsocket.Listen(filter)
		}
		return err
	})
	if send != nil {
		defer send.close()
	}
	if err != nil {
		return err
	}
	answers := make(chan netip.Addr, 1024)
	var wg sync.WaitGroup
	for _, l := range listeners {
		wg.Go(func() { listen(l, identity, answers) })
	}
	// Closed listeners end; until they have, their last answers are discarded.
	defer func() {
		for _, l := range listeners {
			_ = l.Close()
		}
		go func() { wg.Wait(); close(answers) }()
		for range answers {
			continue
		}
	}()
	r := rounds{Prober: p, logger: klog.FromContext(ctx), send: send, identity: identity, answers: answers, peers: map[netip.Addr]*peer{}}
	return r.run(ctx)
}

func listen(l *packetsocket.Listener, identity probe, answers chan<- netip.Addr) {
	for {
		packet, err := l.Next()
		if err != nil {
			return
		}
		if from, ok := identity.isReply(packet.Packet); ok {
			answers <- from
		}
	}
}

// peer is an address that is probed.
type peer struct {
	ready    bool
	answered bool // since its last probe
	missed   int  // probes in a row
	probed   time.Time
}

// rounds is what a series of probes knows.
type rounds struct {
	*Prober
	logger   klog.Logger
	send     *sender
	identity probe
	answers  <-chan netip.Addr
	peers    map[netip.Addr]*peer
	reported Counts
	failure  string // of the last round
}

func (r *rounds) run(ctx context.Context) error {
	changed := r.round()
	timer := time.NewTicker(Interval / 4)
	defer timer.Stop()
	for {
		if changed {
			r.tell()
		}
		changed = false
		select {
		case <-ctx.Done():
			return nil
		case from := <-r.answers:
			changed = r.collect(ctx, from)
		case <-r.wake:
			changed = r.round()
		case <-timer.C:
			changed = r.round()
		}
		if len(r.peers) == 0 {
			r.tell()
			return nil
		}
	}
}

// collect takes an answer, and those that come soon.
func (r *rounds) collect(ctx context.Context, from netip.Addr) (changed bool) {
	changed = r.answered(from)
	soon := time.NewTimer(settle)
	defer soon.Stop()
	for {
		select {
		case <-ctx.Done():
			return changed
		case from := <-r.answers:
			changed = r.answered(from) || changed
		case <-soon.C:
			return changed
		}
	}
}

func (r *rounds) answered(from netip.Addr) (changed bool) {
	known := r.peers[from]
	if known == nil {
		return false
	}
	changed = !known.ready
	known.ready, known.answered, known.missed = true, true, 0
	return changed
}

// round probes the peers whose time has come, and reports whether others are ready than before.
func (r *rounds) round() (changed bool) {
	want := r.opts.Peers()
	there := make(map[netip.Addr]struct{}, len(want))
	now, interval := time.Now(), max(Interval, time.Duration(len(want))*perProbe)
	var due []netip.Addr
	for _, a := range want {
		there[a] = struct{}{}
		known := r.peers[a]
		if known == nil {
			known = &peer{answered: true}
			r.peers[a] = known
		} else if now.Sub(known.probed) < interval {
			continue
		}
		if !known.answered {
			if known.missed++; known.missed == LostAfter && known.ready {
				known.ready, changed = false, true
				r.logger.Info("A node does not take direct server return any more; new connections to its endpoint are masqueraded", "endpoint", a, "unansweredProbes", known.missed)
			}
		}
		known.answered, known.probed = false, now
		due = append(due, a)
	}
	for a, known := range r.peers {
		if _, is := there[a]; !is {
			changed = changed || known.ready
			delete(r.peers, a)
		}
	}
	r.sendAll(due)
	return changed
}

// sendAll sends a probe to each of some addresses. What keeps one from being sent is logged once, and counts as no answer.
func (r *rounds) sendAll(due []netip.Addr) {
	if len(due) == 0 {
		return
	}
	r.identity.round++
	var errs []error
	err := r.opts.Netns.Do(func() error {
		for i, a := range due {
			if err := r.send.send(r.identity, a); err != nil && len(errs) == 0 {
				errs = append(errs, err)
			}
			if i%burst == burst-1 {
				time.Sleep(burst * perProbe / 4)
			}
		}
		return nil
	})
	failure := ""
	if err = errors.Join(append(errs, err)...); err != nil {
		failure = err.Error()
	}
	if failure != "" && failure != r.failure {
		r.logger.Error(err, "Cannot send probes of direct server return; clients of these endpoints are masqueraded", "endpoints", len(due))
	}
	r.failure = failure
}

// burst is how many probes are sent without a pause.
const burst = 64

// tell hands over which addresses are ready.
func (r *rounds) tell() {
	ready := map[netip.Addr]struct{}{}
	var without []netip.Addr
	for a, known := range r.peers {
		if known.ready {
			ready[a] = struct{}{}
		} else {
			without = append(without, a)
		}
	}
	r.opts.Ready(ready)
	counts := Counts{Peers: len(r.peers), Ready: len(ready)}
	r.mu.Lock()
	r.counts = counts
	r.mu.Unlock()
	if counts == r.reported {
		return
	}
	r.reported = counts
	if len(without) == 0 {
		r.logger.Info("The nodes of all endpoints take direct server return", "endpoints", counts.Ready)
		return
	}
	slices.SortFunc(without, netip.Addr.Compare)
	r.logger.Info("The nodes of some endpoints do not take direct server return; connections to these are masqueraded",
		"ready", counts.Ready, "others", len(without), "first", without[0])
}
