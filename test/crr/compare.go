// SPDX-License-Identifier: Apache-2.0

//go:build linux

package crr

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// slice is the number of connections between two measurements.
const slice = 200

// Comparison is a set of variants, each with its cluster ready. The first one is
// what the others are compared with.
type Comparison struct {
	on      *cpu
	entries []*entry
}

// entry is a variant that takes part.
type entry struct {
	Variant
	cluster *Cluster
	servers map[*lab.Pod]*server
}

// Compare makes a cluster with so many Services for each variant. Labs belong to
// the caller, and so does closing them.
func Compare(ctx context.Context, open func() (*lab.Lab, error), services int, variants ...Variant) (_ *Comparison, err error) {
	c := &Comparison{}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if c.on, err = openCPU(); err != nil {
		return nil, err
	}
	for _, v := range variants {
		l, err := open()
		if err != nil {
			return nil, err
		}
		cluster, err := NewCluster(l, services)
		if err != nil {
			return nil, err
		}
		e := &entry{v, cluster, map[*lab.Pod]*server{}}
		c.entries = append(c.entries, e)
		if err := v.Prepare(ctx, cluster); err != nil {
			return nil, fmt.Errorf("prepare %s: %w", v.Name(), err)
		}
		for _, pod := range cluster.servers {
			if e.servers[pod] != nil {
				continue // of another path
			}
			s, err := serve(c.on, pod)
			if err != nil {
				return nil, err
			}
			e.servers[pod] = s
		}
	}
	return c, nil
}

// Close ends the servers. Labs are to be closed after it.
func (c *Comparison) Close() error {
	var errs []error
	for _, e := range c.entries {
		e.cluster.Close()
		for _, s := range e.servers {
			errs = append(errs, s.close())
		}
	}
	return errors.Join(errs...)
}

// Result is what a connection costs with one variant.
type Result struct {
	Variant string
	// Cost is the median of the slices.
	Cost time.Duration
	// Ratio to the first variant is the median of the turns, and half of them
	// are within Spread of it.
	Ratio, Spread float64
}

// Path measures a number of turns on a path, with the variants that support it. It first
// connects to every address of a Service.
func (c *Comparison) Path(p Path, turns int) ([]Result, error) {
	var runners []*runner
	for _, e := range c.entries {
		targets := e.Targets(e.cluster, p)
		if len(targets) == 0 {
			continue
		}
		r := &runner{entry: e, client: newClient(e.cluster.clients[p], e.servers[e.cluster.servers[p]], targets)}
		if err := r.client.check(); err != nil {
			return nil, fmt.Errorf("%s of %s: %w", p, e.Name(), err)
		}
		runners = append(runners, r)
	}
	for turn := range turns {
		for at := range runners {
			r := runners[(at+turn)%len(runners)] // so that no variant is always the first
			if err := r.slice(c.on); err != nil {
				return nil, fmt.Errorf("%s of %s: %w", p, r.Name(), err)
			}
		}
	}
	return summarise(runners), nil
}

// runner is a variant on a path.
type runner struct {
	*entry
	client *client
	costs  []float64 // ns per connection, by turn
}

func (r *runner) slice(on *cpu) error {
	if err := r.cluster.forget(); err != nil {
		return err
	}
	each, err := r.client.cost(on, slice)
	r.costs = append(r.costs, float64(each))
	return err
}

func summarise(runners []*runner) []Result {
	var results []Result
	for _, r := range runners {
		ratios, distances := make([]float64, len(r.costs)), make([]float64, len(r.costs))
		for turn, cost := range r.costs {
			ratios[turn] = cost / runners[0].costs[turn]
		}
		ratio := quantile(ratios, 0.5)
		for turn := range ratios {
			distances[turn] = math.Abs(ratios[turn] - ratio)
		}
		results = append(results, Result{
			Variant: r.Name(), Cost: time.Duration(quantile(r.costs, 0.5)),
			Ratio: ratio, Spread: quantile(distances, 0.5),
		})
	}
	return results
}

// quantile interpolates between neighbours.
func quantile(list []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(list))
	at := q * float64(len(sorted)-1)
	low := int(at)
	high := min(low+1, len(sorted)-1)
	return sorted[low] + (at-float64(low))*(sorted[high]-sorted[low])
}
