// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strconv"

	"github.com/tandem-proxy/tandem/test/lab"
)

// Run is what is played with a program.
type Run struct {
	Program Program
	// Cleaner is a program of this repository, which removes what the other one leaves.
	Cleaner Program
	Cells   []Cell
	// Played, if it is set, is called after the cells in which nothing happens, while the program runs.
	Played func(Results)
}

// Outcome is what came of a run.
type Outcome struct {
	Results Results
	Log     string
	Servers Servers
}

// Run starts a program, plays cells, and removes the program again. Without an outcome, it did not start.
func (w *World) Run(ctx context.Context, run Run) (o *Outcome, err error) {
	p, err := w.Start(ctx, run.Program)
	if err != nil {
		return nil, err
	}
	defer func() {
		o.Log = p.Log()
		err = errors.Join(err, p.Close(ctx, run.Cleaner))
	}()
	of := func(kinds ...string) (list []Cell) {
		for _, c := range run.Cells {
			if slices.Contains(kinds, c.Kind) {
				list = append(list, c)
			}
		}
		return list
	}
	err = errors.Join(w.keepUDP(), w.introduce(ctx))
	o = &Outcome{Results: w.Play(ctx, of(Request, Transfer, Crowd))}
	var failed error
	o.Servers, failed = w.Servers(of(Request))
	err = errors.Join(err, failed)
	if run.Played != nil {
		run.Played(o.Results)
	}
	gap, failed := w.PlayGap(ctx, of(Gap))
	err = errors.Join(err, failed)
	maps.Copy(o.Results, gap)
	if cells := of(Life); len(cells) > 0 {
		life, failed := w.Live(ctx, cells, p)
		err = errors.Join(err, failed)
		maps.Copy(o.Results, life)
	}
	return o, err
}

// keepUDP has netfilter keep UDP flows on an emulated machine for as much longer as that takes for everything.
func (w *World) keepUDP() error {
	if lab.Slower() == 1 {
		return nil
	}
	return w.Node.Do(func() (err error) {
		for name, seconds := range map[string]int{"": 30, "_stream": 120} { // the kernel's defaults
			const setting = "/proc/sys/net/netfilter/nf_conntrack_udp_timeout"
			if failed := os.WriteFile(setting+name, []byte(strconv.Itoa(seconds*int(lab.Slower()))), 0); !errors.Is(failed, fs.ErrNotExist) { // without conntrack
				err = errors.Join(err, failed)
			}
		}
		return err
	})
}

// Unexpected are the cells that are lost and that the profile does not name so.
func (w *World) Unexpected(r Results) []Cell {
	return slices.DeleteFunc(r.lost(), func(c Cell) bool { return matching(w.Lost, c) != nil })
}
