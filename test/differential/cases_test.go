// SPDX-License-Identifier: Apache-2.0

package differential

import (
	"os"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/test/oracle"
)

// withDefaults is Node.Valid for stories.
func withDefaults(c *oracle.Cluster) (list []*v1.Service, ok bool) {
	for _, s := range c.Services {
		list = append(list, oracle.Defaulted(s))
	}
	return list, true
}

// TestCases plays the stories on table and oracle, and on upstream's side where that is built.
func TestCases(t *testing.T) {
	stories, err := Stories()
	if err != nil {
		t.Fatal(err)
	}
	var upstream *Upstream
	if os.Getenv(TracerEnv) != "" {
		upstream = StartT(t)
		defer upstream.LogCounts(t)
	} else {
		t.Logf("%s is not set: not beside upstream", TracerEnv)
	}
	count := 0
	for _, s := range stories {
		t.Run(s.Name, func(t *testing.T) {
			var b Beside
			if upstream != nil {
				b.Upstream = upstream.Node()
				b.Upstream.Valid = withDefaults
			}
			count += s.Play(t, b)
		})
	}
	t.Logf("%d expectations in %d stories", count, len(stories))
}

// TestMalformedCases: a mistake in a case file is an error with its line.
func TestMalformedCases(t *testing.T) {
	const head = "== a title\nservice web\nslice web a@node1\n"
	for _, line := range []string{
		"serve web", "service web port=80", "service web ports=http:eighty", "service web affinity=long", "service web ranges=some", "slice web b",
		"slice web b@node1/tired", "slice web hints=z1", "node zones=z1", "node detect=all", "node nodeports=everywhere", "pod -> web", "pod => web : a",
		"pod -> web : z", "pod -> api : a", "pod -> web.dns : a", "pod -> web:roof : a", "pod -> web#x : a", "cat -> web : a", "pod -> web : a sticky=x",
		"health web : some", "udp pod -> web => a : lost", "udp pod -> web => z : kept", "udp pod -> web : kept",
	} {
		_, err := parseStories("file", head+line+"\n", proxier.IPv4)
		if err == nil || !strings.HasPrefix(err.Error(), "file.txt:4: ") {
			t.Errorf("%s: %v", line, err)
		}
	}
	if _, err := parseStories("file", "service web\n", proxier.IPv4); err == nil {
		t.Error("no title: no error")
	}
	if list, err := parseStories("file", head+"pod,host -> web,web#81 : a\nhealth web : none\n", proxier.IPv6); err != nil || len(list) != 1 || len(list[0].Steps[0].Expectations) != 4 {
		t.Errorf("%+v, %v", list, err)
	}
}
