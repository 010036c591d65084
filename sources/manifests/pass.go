// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
)

const (
	// racy is the granularity of timestamps in file systems. If a file is younger, its
	// timestamps do not prove that it is unchanged.
	racy = 2 * time.Second
	// window is how many documents are decoded before they are delivered. It bounds the
	// memory for large files.
	window = 512
	// maxReported bounds the reported problems per file.
	maxReported = 50
)

// pass checks every file of the directory. It delivers adds and updates immediately. Deletes and
// problems wait until the file is stable.
func (s *Source) pass(ctx context.Context) error {
	names, err := s.list()
	if err != nil {
		return err
	}
	for _, name := range names {
		if s.files[name] == nil {
			s.files[name] = &file{name: name, owns: map[key]struct{}{}}
		}
	}
	files := make([]*file, 0, len(s.files))
	for _, f := range s.files {
		files = append(files, f)
	}
	// The order by name decides which file owns an object that several files have.
	slices.SortFunc(files, func(a, b *file) int { return cmp.Compare(a.name, b.name) })
	for _, f := range files {
		if ctx.Err() != nil {
			return nil
		}
		s.look(ctx, f)
	}
	s.handOver(ctx, files)
	now := s.clock.Now()
	for _, f := range files {
		if !f.stableAt.IsZero() && !f.dirty && (!s.synced || !now.Before(f.stableAt)) {
			s.conclude(f)
		}
	}
	return nil
}

// list returns the names of the manifests. It sets the watch first, so that no later change is
// missed.
func (s *Source) list() ([]string, error) {
	info, err := os.Stat(s.dir)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return nil, fmt.Errorf("%s is not a directory", s.dir)
	}
	if s.watcher != nil {
		s.watcher.Follow(info)
	}
	dir, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, item := range dir {
		if !item.IsDir() && isManifest(item.Name()) {
			names = append(names, item.Name())
		}
	}
	return names, nil
}

// look reads a file if it may have changed.
func (s *Source) look(ctx context.Context, f *file) {
	path := filepath.Join(s.dir, f.name)
	if !f.dirty && f.read {
		info, err := os.Stat(path)
		if err == nil && fingerprintOf(info) == f.print && s.clock.Since(info.ModTime()) > racy {
			return
		}
	}
	f.dirty = false
	data, print, err := readFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if len(f.owns) == 0 {
			// Nothing to delete: a short-lived file or a dangling link.
			delete(s.files, f.name)
			f.forget()
			f.stableAt = time.Time{}
		} else if !f.missing {
			f.missing = true
			f.forget()
			s.delay(f)
		}
		return
	case errors.Is(err, errMoving):
		// The file is still being written. Try again later.
		f.dirty = true
		s.delay(f)
		return
	case err != nil:
		// The state stays, and every pass retries.
		f.read, f.missing = false, false
		if f.failure == err.Error() {
			return
		}
		f.failure = err.Error()
		f.problems = []finding{{0, proxier.Problem{Kind: "File", Reason: proxier.ReasonInvalidFile, Message: err.Error()}}}
		f.unknown = true
		s.delay(f)
		return
	}
	f.print, f.failure = print, ""
	if content := digestOf(data); !f.read || f.missing || f.content != content {
		f.content = content
		s.load(ctx, f, data)
	}
	f.read, f.missing = true, false
}

// forget drops the contents of a file. It keeps owning its objects until they are deleted.
func (f *file) forget() {
	f.read, f.unknown, f.taken, f.failure = false, false, nil, ""
	f.documents, f.holds, f.contested, f.problems = nil, nil, nil, nil
}

// delay postpones deletes and reports of a file until it is stable.
func (s *Source) delay(f *file) { f.stableAt = s.clock.Now().Add(s.opts.Settle) }

// load processes the documents of a file.
func (s *Source) load(ctx context.Context, f *file, data []byte) {
	docs := split(f.name, data)
	old, oldHolds := f.documents, f.holds
	f.documents, f.holds, f.contested = make(map[digest][]key, len(docs)), make(map[key]int, len(docs)), nil
	f.problems, f.unknown = nil, false
	foreign := map[typeMeta]*finding{}

	for len(docs) > 0 {
		n := min(window, len(docs))
		batch := decodeAll(docs[:n], func(d digest) bool {
			keys, known := old[d]
			return known && !slices.ContainsFunc(keys, func(k key) bool { _, taken := f.taken[k]; return taken })
		})
		for i := range batch {
			doc, text := &batch[i].decoded, batch[i].digest
			if batch[i].known {
				used := true
				for _, k := range old[text] {
					used = s.claim(f, &object{key: k, line: docs[i].line}, true) && used
				}
				if used {
					f.documents[text] = old[text]
				}
				continue
			}
			used := len(doc.findings) == 0 && len(doc.foreign) == 0
			keys := make([]key, 0, len(doc.objects))
			for o := range doc.objects {
				used = s.claim(f, &doc.objects[o], false) && used
				keys = append(keys, doc.objects[o].key)
			}
			// A document need not be decoded again only if it has no problems and
			// all of its objects are in use: the handler has its contents then.
			if used {
				f.documents[text] = keys
			}
			f.problems = append(f.problems, doc.findings...)
			f.unknown = f.unknown || doc.unknown
			for _, meta := range doc.foreign {
				if foreign[meta] == nil {
					foreign[meta] = &finding{docs[i].line, proxier.Problem{Kind: "File", Reason: proxier.ReasonInvalidFile, Message: fmt.Sprintf(
						"kind %s of %s is ignored; supported are Service and Node of v1, EndpointSlice of discovery.k8s.io/v1 and ServiceCIDR of networking.k8s.io/v1", meta.Kind, meta.APIVersion)}}
				}
			}
		}
		docs = docs[n:]
		if ctx.Err() != nil {
			return
		}
	}
	for _, problem := range foreign {
		f.problems = append(f.problems, *problem)
	}
	slices.SortStableFunc(f.problems, func(a, b finding) int {
		return cmp.Or(cmp.Compare(a.line, b.line), strings.Compare(a.problem.Message, b.problem.Message))
	})
	if f.unknown {
		// The unreadable part may contain any of the previous objects, so the file
		// keeps all of them.
		for k, line := range oldHolds {
			if _, ok := f.holds[k]; !ok {
				f.holds[k] = line
			}
		}
	}
	f.taken = nil
	s.delay(f)
	klog.FromContext(ctx).V(4).Info("Read a manifest", "file", f.name, "objects", len(f.holds), "problems", len(f.problems))
}

// conclude delivers the deletes of a stable file and reports its problems.
func (s *Source) conclude(f *file) {
	f.stableAt = time.Time{}
	if !f.unknown {
		for _, k := range f.removed() {
			e := s.entries[k]
			delete(s.entries, k)
			delete(f.owns, k)
			s.withdraw(k, e)
		}
	}
	if f.missing && len(f.owns) == 0 {
		delete(s.files, f.name)
		return
	}

	findings := f.problems
	for k := range f.contested {
		e := s.entries[k]
		if e == nil {
			continue
		}
		other := e.file
		findings = append(slices.Clip(findings), duplicate(k, f.holds[k], fmt.Sprintf(
			"already in %s:%d, which is used", other.name, other.holds[k])))
	}
	slices.SortStableFunc(findings, func(a, b finding) int { return cmp.Compare(a.line, b.line) })
	reported := make(map[string]struct{}, len(findings))
	for i, finding := range findings {
		if i == maxReported {
			finding.problem = proxier.Problem{Kind: "File", Reason: proxier.ReasonInvalidFile, Message: fmt.Sprintf("and %d more problems", len(findings)-i)}
		}
		p := finding.problem
		if p.Kind == "File" {
			p.Object = types.NamespacedName{Name: filepath.Join(s.dir, f.name)}
		}
		if finding.line > 0 {
			p.Message = fmt.Sprintf("%s:%d: %s", f.name, finding.line, p.Message)
		} else {
			p.Message = f.name + ": " + p.Message
		}
		id := p.Kind + "\x00" + p.Field + "\x00" + p.Object.String() + "\x00" + p.Message
		if _, before := f.reported[id]; !before {
			s.report(p)
		}
		reported[id] = struct{}{}
		if i == maxReported {
			break
		}
	}
	f.reported = reported
}
