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

// The functions for single rules are for chains of others, where Restore would have to
// know what is there. They heed a context before they start a program, not while it
// runs, which is not for long, and the program has the environment of the caller.

// Insert makes a rule the first of a chain, unless it is anywhere in it.
func (t *Tools) Insert(ctx context.Context, f inet.Family, table, chain string, rule ...string) error {
	exists, err := t.Exists(ctx, f, table, chain, rule...)
	if err != nil || exists {
		return err
	}
	return describe(t.families[f].single.Insert(table, chain, 1, rule...), "insert into", table, chain, rule)
}

// Exists tells whether a chain has a rule. There is none in a chain that does not exist,
// and none that leads to such a chain.
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

// DeleteRule deletes a rule as often as a chain has it.
func (t *Tools) DeleteRule(ctx context.Context, f inet.Family, table, chain string, rule ...string) error {
	for {
		exists, err := t.Exists(ctx, f, table, chain, rule...)
		if err != nil || !exists {
			return err
		}
		if err := t.families[f].single.Delete(table, chain, rule...); err != nil {
			// Somebody else may have been faster.
			if exists, again := t.Exists(ctx, f, table, chain, rule...); again == nil && !exists {
				return nil
			}
			return describe(err, "delete from", table, chain, rule)
		}
	}
}

// absent tells whether a command failed because the chain that the rule leads to does
// not exist. The legacy one takes it for an extension then; a match is always one.
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
