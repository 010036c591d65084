// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"runtime"
	"sync"
	"sync/atomic"
)

type decodedDocument struct {
	decoded
	digest digest
	known  bool
}

// decodeAll decodes documents on all processors: parsing takes nearly all of the time for a
// file.
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

// digest returns the digest of a document, including the type it inherits from a list.
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
