// SPDX-License-Identifier: Apache-2.0

package iptablestest

import (
	"context"
	"strings"
	"sync"

	"github.com/tandem-proxy/tandem/kernel/xtables"
	"github.com/tandem-proxy/tandem/proxier"
)

// Recorder records the inputs of Restore, and lets tests intervene.
type Recorder struct {
	Tools
	// Before may refuse an input. After is called when the input was written.
	Before func(input string) error
	After  func(f proxier.Family)

	mu       sync.Mutex
	restored []string
}

func (r *Recorder) Restore(ctx context.Context, f proxier.Family, input []byte) error {
	if r.Before != nil {
		if err := r.Before(string(input)); err != nil {
			return err
		}
	}
	if err := r.Tools.Restore(ctx, f, input); err != nil {
		return err
	}
	r.mu.Lock()
	r.restored = append(r.restored, string(input))
	r.mu.Unlock()
	if r.After != nil {
		r.After(f)
	}
	return nil
}

// Sizes forwards to tools that have them.
func (r *Recorder) Sizes(f proxier.Family, tables ...string) (text string, ok bool, err error) {
	s, is := r.Tools.(interface {
		Sizes(f proxier.Family, tables ...string) (string, bool, error)
	})
	if !is {
		return "", false, nil
	}
	return s.Sizes(f, tables...)
}

// Uses forwards to tools that have them.
func (r *Recorder) Uses(f proxier.Family, chains ...xtables.ChainName) (text string, ok bool, err error) {
	u, is := r.Tools.(interface {
		Uses(f proxier.Family, chains ...xtables.ChainName) (string, bool, error)
	})
	if !is {
		return "", false, nil
	}
	return u.Uses(f, chains...)
}

// Take returns the inputs written since the last call.
func (r *Recorder) Take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := r.restored
	r.restored = nil
	return list
}

// Refusing returns a Recorder.Before that refuses input that writes a chain.
func Refusing(chain string) func(string) error {
	return func(input string) error {
		if at := strings.Index(input, "\n:"+chain+" "); at >= 0 {
			return &xtables.RestoreError{Line: 2 + strings.Count(input[:at], "\n"), Output: "no chain like that one"}
		}
		return nil
	}
}
