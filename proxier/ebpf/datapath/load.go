// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"

	ciliumebpf "github.com/cilium/ebpf"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/kernel/loading"
)

// Load loads a collection, with the kernel types of loads shortly before it. If the kernel's verifier rejects a program, its complete output is logged:
// the error has only the last lines.
func Load(ctx context.Context, what string, spec *ciliumebpf.CollectionSpec, opts ciliumebpf.CollectionOptions) (*ciliumebpf.Collection, error) {
	opts.Cache = loading.KernelTypes()
	collection, err := ciliumebpf.NewCollectionWithOptions(spec, opts)
	if err == nil {
		return collection, nil
	}
	if rejected := (*ciliumebpf.VerifierError)(nil); errors.As(err, &rejected) {
		klog.FromContext(ctx).V(2).Info("The kernel's verifier rejected a program", "programs", what, "log", fmt.Sprintf("%+v", rejected))
	}
	return nil, fmt.Errorf("load the %s: %w", what, err)
}
