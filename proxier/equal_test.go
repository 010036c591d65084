// SPDX-License-Identifier: Apache-2.0

package proxier

import (
	"reflect"
	"testing"

	"github.com/tandem-proxy/tandem/test/equality"
)

const (
	backing = "only the memory that a list of the value uses"
	parsed  = "NodeSelector, parsed"
)

// A field that is added to one of these types has to be compared, or listed
// here with the reason why not.
func TestEveryFieldIsCompared(t *testing.T) {
	equality.Check(t,
		equality.Of("Service", (*Service).equal, map[string]string{
			"Name": "the tracker compares Services of one name", "onePort": backing, "More.selector": parsed,
		}),
		equality.Of("ServiceExtras", (*ServiceExtras).equal, map[string]string{"selector": parsed}),
		equality.Of("EndpointSlice", (*EndpointSlice).equal, map[string]string{"onePort": backing}),
		equality.Of("Frontend", (*Frontend).equal, nil),
		equality.Of("Decision", (*Decision).equal, map[string]string{
			"index": "identifies the service port; two decisions that are compared have the same", "oneFrontend": backing,
		}),
		equality.Of("Detector", (*Detector).equal, nil),
		equality.Of("Facts", (*Facts).equal, nil),
		equality.Of("Facts.decidesAlike", (*Facts).decidesAlike, map[string]string{
			"LocalAddrs": "part of NodeRules", "UplinkAddrs": "compared where ServiceLB serves a Service", "ServiceCIDRs": "part of NodeRules", "Uplinks": "part of NodeRules",
			"Labels": "compared by the Services that select nodes",
		}),
		equality.Of("NodeRules", (*NodeRules).Equal, nil),
		equality.Of("claimsAs", (*Decision).claimsAs, map[string]string{
			"Name": "identifies the service port", "UID": "no claim", "index": "identifies the service port", "oneFrontend": backing,
			"Affinity": "no claim", "OptedOut": "no claim", "Balancing": "no claim", "Weighted": "no claim", "HealthCheckNodePort": "no claim", "Backends": "no claim", "Empty": "no claim",
			"Frontends[0].Routes": "no claim", "Frontends[0].Filtered": "no claim", "Frontends[0].RejectOthers": "no claim", "Frontends[0].Ranges": "no claim",
			"Frontends[0].Pods": "no claim", "Frontends[0].Host": "no claim", "Frontends[0].Unguarded": "no claim",
			"Frontends[0].Conflict": "the outcome of claims", "Frontends[0].Left": "no claim",
		}),
	)
}

// Types that are compared by == take part with every field, unless one is a pointer.
func TestPlainComparisons(t *testing.T) {
	for _, v := range []any{Backend{}, Route{}, HealthCheck{}, ServicePort{}, endpointPort{}, frontendKey{}} {
		if !reflect.TypeOf(v).Comparable() {
			t.Errorf("%T cannot be compared", v)
		}
		for i := range reflect.TypeOf(v).NumField() {
			if f := reflect.TypeOf(v).Field(i); f.Type.Kind() == reflect.Pointer {
				t.Errorf("%T.%s is a pointer: two that say the same differ", v, f.Name)
			}
		}
	}
}
