// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"context"
	"fmt"

	"github.com/tandem-proxy/tandem/proxier"
)

// entry is an object, with the file that owns it.
type entry struct {
	file      *file
	delivered bool
	digest    digest
	service   string // of an EndpointSlice
}

// claim records an object of a file. The file becomes its owner, unless another file or an
// earlier document of this file has the object already. It reports whether this object is in
// use. A known object has not changed since the file was last read, and was in use then.
func (s *Source) claim(f *file, o *object, known bool) bool {
	if o.key.kind == kindNode && o.key.name != s.opts.NodeName {
		return true // other Nodes are not used, which is no conflict
	}
	if line, twice := f.holds[o.key]; twice {
		f.problems = append(f.problems, duplicate(o.key, o.line, fmt.Sprintf("already in line %d of this file, which is used", line)))
		return false
	}
	e := s.entries[o.key]
	if !known && !o.valid() {
		// The previous version stays, if this file provided it.
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

// handOver transfers objects that their file dropped to the first other file that has them,
// without a delete in between.
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
				// Read the file even if its content is unchanged: documents with
				// objects of other owners are not cached.
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
				// The reported conflict has the wrong file.
				f.contested[k] = e.file
				s.delay(f)
			}
		}
	}
}
