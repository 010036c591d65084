// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"context"
	"fmt"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// Save reads a table. A table that was never written has its built-in chains, or none.
func (t *Tools) Save(ctx context.Context, f inet.Family, table string) (*Table, error) {
	tables, err := t.save(ctx, f, "-t", table)
	if err != nil {
		return nil, fmt.Errorf("save table %s: %w", table, err)
	}
	for _, found := range tables {
		if found.Name == table {
			return found, nil
		}
	}
	return &Table{Name: table}, nil
}

// SaveAll reads several tables at once. The programs of the nft variant read all tables even to
// print one.
func (t *Tools) SaveAll(ctx context.Context, f inet.Family, tables ...string) (map[string]*Table, error) {
	all := map[string]*Table{}
	if t.variant == NFT {
		found, err := t.save(ctx, f)
		if err != nil {
			return nil, fmt.Errorf("save all tables: %w", err)
		}
		for _, table := range found {
			all[table.Name] = table
		}
	}
	for _, name := range tables {
		switch {
		case t.variant == Legacy:
			table, err := t.Save(ctx, f, name)
			if err != nil {
				return nil, err
			}
			all[name] = table
		case all[name] == nil:
			all[name] = &Table{Name: name}
		}
	}
	return all, nil
}

func (t *Tools) save(ctx context.Context, f inet.Family, args ...string) ([]*Table, error) {
	p := t.families[f]
	if p.missing != nil {
		return nil, p.missing
	}
	out, err := run(ctx, p.save, nil, args...)
	if err != nil {
		return nil, err
	}
	tables, err := parse(out)
	if err != nil {
		return nil, fmt.Errorf("read what %s printed: %w", p.save, err)
	}
	return tables, nil
}

// Existing reads all tables of a family that exist. Unlike Save, it creates none.
func (t *Tools) Existing(ctx context.Context, f inet.Family) ([]*Table, error) {
	if err := t.families[f].missing; err != nil {
		return nil, err
	}
	tables, err := t.save(ctx, f)
	if err != nil {
		return nil, fmt.Errorf("save all tables: %w", err)
	}
	return tables, nil
}

// SaveExisting reads a table if it exists, which only the legacy variant can tell without creating it;
// nil if not.
func (t *Tools) SaveExisting(ctx context.Context, f inet.Family, table string) (*Table, error) {
	if t.variant == Legacy && !hasLegacyTable(f, table) {
		return nil, nil
	}
	return t.Save(ctx, f, table)
}

// HasLegacy reports whether the legacy variant has one of the tables, in the network namespace of the
// calling thread.
func HasLegacy(tables ...string) bool {
	for f := range inet.Families {
		for _, table := range tables {
			if hasLegacyTable(f, table) {
				return true
			}
		}
	}
	return false
}
