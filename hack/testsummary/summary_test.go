// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestProgress: who waits sees how far it is.
func TestProgress(t *testing.T) {
	var out strings.Builder
	s := newSummary(&out)
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	s.brief = true
	s.progress = progress{packages: 12, start: at, now: func() time.Time { return at.Add(90 * time.Second) }}
	in := []string{
		`{"Action":"run","Package":"a.com/a/b/web","Test":"TestA"}`,
		`{"Action":"run","Package":"a.com/a/b/web","Test":"TestA/one"}`,
		`{"Action":"output","Package":"a.com/a/b/web","Test":"TestA/one","Output":"    a_test.go:3: needs root\n"}`,
		`{"Action":"skip","Package":"a.com/a/b/web","Test":"TestA/one"}`,
	}
	if err := s.read(strings.NewReader(strings.Join(in, "\n"))); err != nil {
		t.Fatal(err)
	}
	s.beat()
	in = []string{`{"Action":"pass","Package":"a.com/a/b/web","Test":"TestA"}`, `{"Action":"pass","Package":"a.com/a/b/web","Elapsed":1}`}
	if err := s.read(strings.NewReader(strings.Join(in, "\n"))); err != nil {
		t.Fatal(err)
	}
	s.beat() // nothing is running
	s.finish()
	want := "      90 s: web TestA (0 passed, 0 failed, 1 skipped)\n" +
		"[ 1/12   90 s] ok    web                              1.0 s  0 passed, 0 failed, 1 skipped\n" +
		"\nSkipped:\n      1  needs root\n\n0 passed, 0 failed, 1 skipped, in 90 s\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestSummary(t *testing.T) {
	const p = `"Package":"example.com/a/b/web"`
	tests := []struct {
		name string
		in   []string
		want string
		ok   bool
	}{
		{
			name: "only leaves count",
			in: []string{
				`{"Action":"run",` + p + `,"Test":"TestA"}`,
				`{"Action":"run",` + p + `,"Test":"TestA/one"}`,
				`{"Action":"pass",` + p + `,"Test":"TestA/one"}`,
				`{"Action":"run",` + p + `,"Test":"TestA/two"}`,
				`{"Action":"pass",` + p + `,"Test":"TestA/two"}`,
				`{"Action":"pass",` + p + `,"Test":"TestA"}`,
				`{"Action":"pass",` + p + `,"Elapsed":1.25}`,
			},
			want: "ok    web                              1.2 s  2 passed, 0 failed, 0 skipped\n\n2 passed, 0 failed, 0 skipped\n",
			ok:   true,
		},
		{
			name: "a failed subtest is one failure",
			in: []string{
				`{"Action":"run",` + p + `,"Test":"TestA"}`,
				`{"Action":"run",` + p + `,"Test":"TestA/one"}`,
				`{"Action":"output",` + p + `,"Test":"TestA/one","Output":"    a_test.go:3: bad\n"}`,
				`{"Action":"fail",` + p + `,"Test":"TestA/one"}`,
				`{"Action":"fail",` + p + `,"Test":"TestA"}`,
				`{"Action":"fail",` + p + `,"Elapsed":2}`,
			},
			want: "          a_test.go:3: bad\nFAIL  web                              2.0 s  0 passed, 1 failed, 0 skipped\n" +
				"\nFailed:\n  web TestA/one\n      a_test.go:3: bad\n\n0 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "a command that fails has no messages: its last lines say why",
			in: []string{
				`{"Action":"run",` + p + `,"Test":"Demo"}`,
				`{"Action":"output",` + p + `,"Test":"Demo","Output":"1. Start\n"}`,
				`{"Action":"output",` + p + `,"Test":"Demo","Output":"\n"}`,
				`{"Action":"output",` + p + `,"Test":"Demo","Output":"FAIL it did not\n"}`,
				`{"Action":"fail",` + p + `,"Test":"Demo"}`,
				`{"Action":"fail",` + p + `,"Elapsed":2}`,
			},
			want: "      1. Start\n      \n      FAIL it did not\n" +
				"FAIL  web                              2.0 s  0 passed, 1 failed, 0 skipped\n" +
				"\nFailed:\n  web Demo\n      1. Start\n      FAIL it did not\n\n0 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "skips are listed by reason",
			in: []string{
				`{"Action":"run",` + p + `,"Test":"TestA"}`,
				`{"Action":"output",` + p + `,"Test":"TestA","Output":"=== RUN   TestA\n"}`,
				`{"Action":"output",` + p + `,"Test":"TestA","Output":"I1128 21:13:27.575803    1844 a.go:346] \"Programmed\"\n"}`,
				`{"Action":"output",` + p + `,"Test":"TestA","Output":"Skipped: root\n"}`,
				`{"Action":"output",` + p + `,"Test":"TestA","Output":"    a_test.go:2: what it did before\n"}`,
				`{"Action":"output",` + p + `,"Test":"TestA","Output":"    a_test.go:3: missing: root\n"}`,
				`{"Action":"output",` + p + `,"Test":"TestA","Output":"--- SKIP: TestA (0.00s)\n"}`,
				`{"Action":"skip",` + p + `,"Test":"TestA"}`,
				`{"Action":"output",` + p + `,"Output":"ok  \texample.com/a/b/web\t(cached)\n"}`,
				`{"Action":"pass",` + p + `}`,
			},
			want: "ok    web                            cached   0 passed, 0 failed, 1 skipped\n" +
				"\nSkipped:\n  missing: root\n      web TestA\n\n0 passed, 0 failed, 1 skipped\n",
			ok: true,
		},
		{
			name: "a test that is played later was not skipped",
			in: []string{
				`{"Action":"run",` + p + `,"Test":"TestA"}`,
				`{"Action":"skip",` + p + `,"Test":"TestA"}`,
				`{"Action":"run",` + p + `,"Test":"TestB"}`,
				`{"Action":"skip",` + p + `,"Test":"TestB"}`,
				`{"Action":"pass",` + p + `,"Elapsed":1}`,
				`{"Action":"run",` + p + `,"Test":"TestA"}`,
				`{"Action":"run",` + p + `,"Test":"TestA/one"}`,
				`{"Action":"pass",` + p + `,"Test":"TestA/one"}`,
				`{"Action":"pass",` + p + `,"Test":"TestA"}`,
				`{"Action":"run",` + p + `,"Test":"TestB"}`,
				`{"Action":"output",` + p + `,"Test":"TestB","Output":"    a_test.go:3: missing: IPVS\n"}`,
				`{"Action":"skip",` + p + `,"Test":"TestB"}`,
				`{"Action":"pass",` + p + `,"Elapsed":1}`,
			},
			want: "ok    web                              1.0 s  0 passed, 0 failed, 2 skipped\n" +
				"ok    web                              1.0 s  1 passed, 0 failed, 1 skipped\n" +
				"\nSkipped:\n  missing: IPVS\n      web TestB\n\n1 passed, 0 failed, 1 skipped\n",
			ok: true,
		},
		{
			name: "packages in several places",
			in: []string{
				`{"Action":"run","Package":"a.com/a/b/web@6.1","Test":"TestA"}`,
				`{"Action":"pass","Package":"a.com/a/b/web@6.1","Test":"TestA"}`,
				`{"Action":"pass","Package":"a.com/a/b/web@6.1","Elapsed":2.6}`,
				`{"Action":"run","Package":"a.com/a/b/web@6.12","Test":"TestA"}`,
				`{"Action":"fail","Package":"a.com/a/b/web@6.12","Test":"TestA"}`,
				`{"Action":"fail","Package":"a.com/a/b/web@6.12","Elapsed":1}`,
				`{"Action":"run","Package":"a.com/a/b/db@6.1","Test":"TestA"}`,
				`{"Action":"pass","Package":"a.com/a/b/db@6.1","Test":"TestA"}`,
				`{"Action":"pass","Package":"a.com/a/b/db@6.1","Elapsed":4}`,
			},
			want: "ok    web@6.1                          2.6 s  1 passed, 0 failed, 0 skipped\n" +
				"FAIL  web@6.12                         1.0 s  0 passed, 1 failed, 0 skipped\n" +
				"ok    db@6.1                           4.0 s  1 passed, 0 failed, 0 skipped\n" +
				"\nFailed:\n  web@6.12 TestA\n" +
				"\nPassed/failed/skipped, and seconds:\n" +
				"  package  6.1      6.12\n" +
				"  web      1/0/0 3  0/1/0 1\n" +
				"  db       1/0/0 4  -\n" +
				"  all      2/0/0 7  0/1/0 1\n" +
				"\n2 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "a test that never ends",
			in: []string{
				`{"Action":"run",` + p + `,"Test":"TestA"}`,
				`{"Action":"output",` + p + `,"Output":"panic: test timed out\n"}`,
				`{"Action":"fail",` + p + `,"Elapsed":9}`,
			},
			want: "      panic: test timed out\nFAIL  web                              9.0 s  0 passed, 1 failed, 0 skipped\n" +
				"\nFailed:\n  web TestA (did not end)\n\n0 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "a package that does not build",
			in: []string{
				`{"ImportPath":"web.test","Action":"build-output","Output":"a.go:1: no\n"}`,
				`{"ImportPath":"web.test","Action":"build-fail"}`,
				`{"Action":"fail",` + p + `,"FailedBuild":"web.test"}`,
			},
			want: "      a.go:1: no\nFAIL  web                              0.0 s  0 passed, 1 failed, 0 skipped\n" +
				"\nFailed:\n  web (the package itself)\n\n0 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "a stream that breaks off",
			in:   []string{`{"Action":"start",` + p + `}`},
			want: "\nFailed:\n  web (did not end)\n\n0 passed, 1 failed, 0 skipped\n",
		},
		{
			name: "nothing at all",
			in:   []string{"go: no such pattern"},
			want: "go: no such pattern\n\nNo tests were run.\n\n0 passed, 0 failed, 0 skipped\n",
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var out strings.Builder
			s := newSummary(&out)
			if err := s.read(strings.NewReader(strings.Join(test.in, "\n") + "\n")); err != nil {
				t.Fatal(err)
			}
			if ok := s.finish(); ok != test.ok {
				t.Errorf("finish() = %v, want %v", ok, test.ok)
			}
			if diff := cmp.Diff(test.want, out.String()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestMessages(t *testing.T) {
	var output strings.Builder
	for i := range 20 {
		fmt.Fprintf(&output, "    a_test.go:%d: message\n      its second line\n", i)
	}
	output.WriteString("    watched.go:4: log of the process on node1:\n      I1127 started\n--- FAIL: TestA (0.00s)\n")
	var want []string
	for _, i := range []int{0, 1, 2, 17, 18, 19} {
		want = append(want, fmt.Sprintf("a_test.go:%d: message", i))
	}
	if got := messages(output.String()); !slices.Equal(got, want) {
		t.Errorf("messages %q, want %q", got, want)
	}
}
