// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"context"
	"errors"
	"fmt"
	"strings"

	goiptables "github.com/coreos/go-iptables/iptables"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// The functions for single rules are for foreign chains, for which Restore would need the existing
// rules. They check the context before they start a program, but not while it runs, which is short.
// The program has the environment of the caller.

// Insert inserts a rule at the front of a chain, unless the chain has it.
func (t *Tools) Insert(ctx context.Context, f inet.Family, table, chain string, rule ...string) error {
	exists, err := t.Exists(ctx, f, table, chain, rule...)
	if err != nil || exists {
		return err
	}
	return describe(t.families[f].single.Insert(table, chain, 1, rule...), "insert into", table, chain, rule)
}

// Exists reports whether a chain has a rule. It returns false if the chain, or the target chain of
// the rule, does not exist.
func (t *Tools) Exists(ctx context.Context, f inet.Family, table, chain string, rule ...string) (bool, error) {
	if err := errors.Join(t.families[f].missing, ctx.Err()); err != nil {
		return false, err
	}
	exists, err := t.families[f].single.Exists(table, chain, rule...)
	if err != nil && absent(err) {
		return false, nil
	}
	return exists, describe(err, "look into", table, chain, rule)
}

// DeleteRule deletes a rule, including duplicates.
func (t *Tools) DeleteRule(ctx context.Context, f inet.Family, table, chain string, rule ...string) error {
	for {
		exists, err := t.Exists(ctx, f, table, chain, rule...)
		if err != nil || !exists {
			return err
		}
		if err := t.families[f].single.Delete(table, chain, rule...); err != nil {
			// Another program may have deleted it first.
			if exists, again := t.Exists(ctx, f, table, chain, rule...); again == nil && !exists {
				return nil
			}
			return describe(err, "delete from", table, chain, rule)
		}
	}
}

// absent reports whether a command failed because the target chain of the rule does not exist. The
// legacy command then takes the chain's name for a missing target extension. A missing match
// extension is a real error.
func absent(err error) bool {
	failed := (*goiptables.Error)(nil)
	return errors.As(err, &failed) && failed.IsNotExist() &&
		(strings.Contains(err.Error(), "Chain '") || strings.Contains(err.Error(), "load target"))
}

func describe(err error, step, table, chain string, rule []string) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	if failed := (*goiptables.Error)(nil); errors.As(err, &failed) {
		err = errors.New(oneLine(text))
	}
	if locked(text) {
		err = fmt.Errorf("%w: %w", ErrLocked, err)
	}
	return fmt.Errorf("%s chain %s of table %s: %s: %w%s", step, chain, table, strings.Join(rule, " "), err, advice(text))
}
