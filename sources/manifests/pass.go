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
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
)

const (
	// racy is the age below which a file's times do not prove that it is
	// unchanged: file systems stamp with a granularity of up to this.
	racy = 2 * time.Second
	// window is how many documents are decoded before they are delivered, so
	// that not all of a large file is in memory at once.
	window = 512
	// maxReported bounds the problems told of one file.
	maxReported = 50
)

// entry is an object that some file owns.
type entry struct {
	file      *file
	delivered bool
	digest    digest
	service   string // of an EndpointSlice
}

// pass looks at every file of the directory. It adds and updates at once;
// deletes and problems wait until a file has settled.
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
	// In the order of names, so that it does not depend on chance which file
	// an object is taken from.
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
		if !f.settles.IsZero() && !f.dirty && (!s.synced || !now.Before(f.settles)) {
			s.conclude(f)
		}
	}
	return nil
}

// list returns the names of the manifests. The watch comes first: what changes
// after it is set is seen, before or by the next pass.
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
			// Nothing to delete: it came and went, or is a link to nowhere.
			delete(s.files, f.name)
			f.forget()
			f.settles = time.Time{}
		} else if !f.missing {
			f.missing = true
			f.forget()
			s.settle(f)
		}
		return
	case errors.Is(err, errMoving):
		// Its writer is not done. Another look when it may be.
		f.dirty = true
		s.settle(f)
		return
	case err != nil:
		// The state stays, and every pass tries again.
		f.read, f.missing = false, false
		if f.failure == err.Error() {
			return
		}
		f.failure = err.Error()
		f.problems = []finding{{0, proxier.Problem{Kind: "File", Reason: proxier.ReasonInvalidFile, Message: err.Error()}}}
		f.unknown = true
		s.settle(f)
		return
	}
	f.print, f.failure = print, ""
	if content := digestOf(data); !f.read || f.missing || f.content != content {
		f.content = content
		s.load(ctx, f, data)
	}
	f.read, f.missing = true, false
}

// forget drops what a file said; what it owns stays its own for now.
func (f *file) forget() {
	f.read, f.unknown, f.taken, f.failure = false, false, nil, ""
	f.documents, f.holds, f.contested, f.problems = nil, nil, nil, nil
}

func (s *Source) settle(f *file) { f.settles = s.clock.Now().Add(s.opts.Settle) }

// load takes the documents of a file in.
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
			// Only a text that is in order, and whose objects are the ones in
			// use, need not be looked at again: what it says is what the
			// handler was told last.
			if used {
				f.documents[text] = keys
			}
			f.problems = append(f.problems, doc.findings...)
			f.unknown = f.unknown || doc.unknown
			for _, meta := range doc.foreign {
				if foreign[meta] == nil {
					foreign[meta] = &finding{docs[i].line, proxier.Problem{Kind: "File", Reason: proxier.ReasonInvalidFile, Message: fmt.Sprintf(
						"kind %s of %s is not read; Service and Node of v1, EndpointSlice of discovery.k8s.io/v1 and ServiceCIDR of networking.k8s.io/v1 are", meta.Kind, meta.APIVersion)}}
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
		// What cannot be read may be any of what was there: it goes on
		// claiming all of it.
		for k, line := range oldHolds {
			if _, ok := f.holds[k]; !ok {
				f.holds[k] = line
			}
		}
	}
	f.taken = nil
	s.settle(f)
	klog.FromContext(ctx).V(4).Info("Read a manifest", "file", f.name, "objects", len(f.holds), "problems", len(f.problems))
}

type decodedDocument struct {
	decoded
	digest digest
	known  bool
}

// decodeAll decodes documents on all processors: parsing is nearly all of what
// a file costs.
func decodeAll(docs []document, known func(digest) bool) []decodedDocument {
	out := make([]decodedDocument, len(docs))
	var next atomic.Int64
	work := func() {
		for {
			i := int(next.Add(1)) - 1
			if i >= len(docs) {
				return
			}
			out[i].digest = docs[i].digest()
			if out[i].known = docs[i].err == nil && known(out[i].digest); !out[i].known {
				out[i].decoded = decode(docs[i])
			}
		}
	}
	var workers sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(docs)) - 1 {
		workers.Go(work)
	}
	work()
	workers.Wait()
	return out
}

// digest of a document, with what it inherits.
func (d document) digest() digest {
	sum := digestOf(d.text)
	if d.list != (typeMeta{}) {
		inherited := digestOf([]byte(d.list.APIVersion + "\x00" + d.list.Kind))
		for i := range sum {
			sum[i] ^= inherited[i]
		}
	}
	return sum
}

// claim takes an object of a file: as the file's own, or as one that another
// file, or an earlier document of this one, has already. It tells whether the
// object is the one in use. One that is known has not changed since the file
// was last read, and was in use then.
func (s *Source) claim(f *file, o *object, known bool) bool {
	if o.key.kind == kindNode && o.key.name != s.opts.NodeName {
		return true // in use, if by nobody
	}
	if line, twice := f.holds[o.key]; twice {
		f.problems = append(f.problems, duplicate(o.key, o.line, fmt.Sprintf("already in line %d of this file, which is used", line)))
		return false
	}
	e := s.entries[o.key]
	if !known && !o.valid() {
		// It stays as it was, if it was this file's.
		if e != nil && e.file == f {
			f.holds[o.key] = o.line
		}
		return false
	}
	f.holds[o.key] = o.line
	switch {
	case e == nil:
		e = &entry{file: f}
		s.entries[o.key] = e
		f.owns[o.key] = struct{}{}
	case e.file != f:
		if _, held := e.file.holds[o.key]; held {
			if f.contested == nil {
				f.contested = map[key]*file{}
			}
			f.contested[o.key] = e.file
			return false
		}
		s.transfer(o.key, e, f)
	}
	if !known {
		s.deliver(e, o)
	}
	return true
}

func (s *Source) transfer(k key, e *entry, to *file) {
	delete(e.file.owns, k)
	e.file = to
	to.owns[k] = struct{}{}
}

func duplicate(k key, line int, message string) finding {
	return finding{line, proxier.Problem{
		Kind: k.kind.String(), Object: k.namespacedName(), Field: "metadata.name", Reason: proxier.ReasonDuplicateName, Message: message,
	}}
}

// handOver gives objects that their file dropped to the first other file that
// has them, without a delete between.
func (s *Source) handOver(ctx context.Context, files []*file) {
	for {
		again := false
		for _, f := range files {
			for k := range f.contested {
				e := s.entries[k]
				if e != nil {
					if _, held := e.file.holds[k]; held {
						continue
					}
				}
				if f.taken == nil {
					f.taken = map[key]struct{}{}
				}
				f.taken[k] = struct{}{}
			}
			if len(f.taken) > 0 {
				// The digest of the content does not count: what was not its
				// own was not kept.
				f.read = false
				f.contested = nil
				s.look(ctx, f)
				again = again || f.read
			}
			if ctx.Err() != nil {
				return
			}
		}
		if !again {
			break
		}
	}
	for _, f := range files {
		for k, owner := range f.contested {
			if e := s.entries[k]; e != nil && e.file != owner {
				// What was reported names the wrong file now.
				f.contested[k] = e.file
				s.settle(f)
			}
		}
	}
}

// conclude draws the consequences from a file that has settled.
func (s *Source) conclude(f *file) {
	f.settles = time.Time{}
	if !f.unknown {
		for _, k := range f.leaving() {
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
			finding.problem = proxier.Problem{Kind: "File", Reason: proxier.ReasonInvalidFile, Message: fmt.Sprintf("and %d more problems from here on", len(findings)-i)}
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

// deliver tells the handler of an object, if there is news.
func (s *Source) deliver(e *entry, o *object) {
	if o.absent {
		s.withdraw(o.key, e)
		return
	}
	if e.delivered && e.digest == o.digest {
		return
	}
	update := e.delivered
	old := *e
	e.delivered, e.digest = true, o.digest
	switch {
	case o.service != nil && update:
		s.handler.OnServiceUpdate(serviceStub(o.key), o.service)
	case o.service != nil:
		s.handler.OnServiceAdd(o.service)
	case o.slice != nil:
		e.service = strings.Clone(o.slice.Labels[discoveryv1.LabelServiceName])
		if update && old.service != e.service {
			// The receiver files slices by Service, and an update only names
			// the new one.
			s.handler.OnEndpointSliceDelete(sliceStub(o.key, &old))
			update = false
		}
		if update {
			s.handler.OnEndpointSliceUpdate(sliceStub(o.key, &old), o.slice)
		} else {
			s.handler.OnEndpointSliceAdd(o.slice)
		}
	case o.cidr != nil:
		s.opts.OnServiceCIDR(o.key.name, o.cidr.Spec.CIDRs)
	case update:
		s.handler.OnNodeUpdate(nodeStub(o.key), o.node)
	default:
		s.handler.OnNodeAdd(o.node)
	}
}

// withdraw tells the handler that an object is gone.
func (s *Source) withdraw(k key, e *entry) {
	if !e.delivered {
		return
	}
	e.delivered = false
	switch k.kind {
	case kindService:
		s.handler.OnServiceDelete(serviceStub(k))
	case kindEndpointSlice:
		s.handler.OnEndpointSliceDelete(sliceStub(k, e))
	case kindNode:
		s.handler.OnNodeDelete(nodeStub(k))
	case kindServiceCIDR:
		s.opts.OnServiceCIDR(k.name, nil)
	}
}

// These stand for former states, which are not retained.

func serviceStub(k key) *v1.Service {
	return &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: k.namespace, Name: k.name}}
}

func sliceStub(k key, e *entry) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Namespace: k.namespace, Name: k.name, Labels: map[string]string{discoveryv1.LabelServiceName: e.service},
	}}
}

func nodeStub(k key) *v1.Node {
	return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: k.name}}
}
