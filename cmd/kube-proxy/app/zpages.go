// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"fmt"
	"mime"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-base/version"
	zpagesfeatures "k8s.io/component-base/zpages/features"
	"sigs.k8s.io/yaml"
)

// zGroup is the API group of what /statusz and /flagz say, and zVersions are its versions,
// newest first.
const zGroup = "config.k8s.io"

var zVersions = []string{"v1beta1", "v1alpha1"}

// zHead begins every object.
type zHead struct {
	metav1.TypeMeta `json:",inline"`
	Metadata        zMeta `json:"metadata"`
}

type zMeta struct {
	Name string `json:"name"`
}

// statusz is how the process runs.
type statusz struct {
	zHead            `json:",inline"`
	StartTime        time.Time `json:"startTime"`
	UptimeSeconds    int64     `json:"uptimeSeconds"`
	GoVersion        string    `json:"goVersion"`
	BinaryVersion    string    `json:"binaryVersion"`
	EmulationVersion string    `json:"emulationVersion"`
	Paths            []string  `json:"paths"`
}

// flagz are the flags as they were given, or their defaults.
type flagz struct {
	zHead `json:",inline"`
	Flags map[string]string `json:"flags"`
}

// zPaths are those of upstream's proxy.
var zPaths = []string{"/configz", "/flagz", "/healthz", "/metrics", "/proxyMode"}

// installZPages adds /statusz and /flagz, unless their feature gates are off.
func (p *proxy) installZPages(mux *http.ServeMux) {
	paths := zPaths
	if !p.opts.gate.Enabled(zpagesfeatures.ComponentFlagz) {
		paths = slices.DeleteFunc(slices.Clone(paths), func(path string) bool { return path == "/flagz" })
	} else {
		mux.Handle("/flagz", &zPage{kind: "Flagz", text: func() string { return flagsText(p.opts.flags) }, object: func(h zHead) any {
			return &flagz{h, flagValues(p.opts.flags)}
		}})
	}
	if !p.opts.gate.Enabled(zpagesfeatures.ComponentStatusz) {
		return
	}
	status := func(h zHead) *statusz {
		return &statusz{
			zHead: h, StartTime: p.started.UTC().Truncate(time.Second), UptimeSeconds: int64(time.Since(p.started).Seconds()), GoVersion: runtime.Version(),
			BinaryVersion: strings.TrimPrefix(buildVersion(), "v"), EmulationVersion: version.DefaultKubeBinaryVersion, Paths: paths,
		}
	}
	mux.Handle("/statusz", &zPage{kind: "Statusz", text: func() string { return status(zHead{}).text() }, object: func(h zHead) any { return status(h) }})
}

func (s *statusz) text() string {
	up := s.UptimeSeconds
	return fmt.Sprintf("\nStarted: %s\nUp: %d hr %02d min %02d sec\nGo version: %s\nBinary version: %s\nEmulation version: %s\nPaths: %s\n",
		s.StartTime.Format(time.UnixDate), up/3600, up/60%60, up%60, s.GoVersion, s.BinaryVersion, s.EmulationVersion, strings.Join(s.Paths, " "))
}

func flagValues(flags *pflag.FlagSet) map[string]string {
	all := map[string]string{}
	flags.VisitAll(func(f *pflag.Flag) { all[f.Name] = f.Value.String() })
	return all
}

func flagsText(flags *pflag.FlagSet) string {
	var b strings.Builder
	flags.VisitAll(func(f *pflag.Flag) { fmt.Fprintf(&b, "%s=%s\n", f.Name, f.Value) })
	return b.String()
}

// zPage is text for people, and an object for programs that ask for it by its kind.
type zPage struct {
	kind   string
	text   func() string
	object func(zHead) any
}

func (z *zPage) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	format, v := z.negotiate(r.Header.Get("Accept"))
	// In what follows, the client is gone if writing fails.
	switch format {
	case "":
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotAcceptable)
		_ = json.NewEncoder(w).Encode(&metav1.Status{
			TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Code: http.StatusNotAcceptable, Reason: metav1.StatusReasonNotAcceptable,
			Message: "only the following media types are accepted: application/json, application/yaml, text/plain",
		})
		return
	case "text/plain":
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = fmt.Fprintf(w, "\n%s %s\nWarning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for debugging purposes only.\n%s",
			component, strings.ToLower(z.kind), z.text())
		return
	}
	w.Header().Set("Content-Type", fmt.Sprintf("%s;g=%s;v=%s;as=%s", format, zGroup, v, z.kind))
	if v != zVersions[0] {
		w.Header().Set("Warning", fmt.Sprintf(`299 - "This version of the %s endpoint is deprecated. Please use a newer version."`, strings.ToLower(z.kind)))
	}
	text, err := json.Marshal(z.object(zHead{metav1.TypeMeta{Kind: z.kind, APIVersion: zGroup + "/" + v}, zMeta{component}}))
	if err == nil && format == "application/yaml" {
		text, err = yaml.JSONToYAML(text)
	}
	if err != nil {
		return // not with these fields
	}
	_, _ = w.Write(append(text, '\n'))
}

// negotiate chooses the first media type of a list that there is; an empty format is none.
func (z *zPage) negotiate(accept string) (format, v string) {
	if accept == "" {
		return "text/plain", ""
	}
	for each := range strings.SplitSeq(accept, ",") {
		name, params, err := mime.ParseMediaType(each)
		if err != nil {
			continue
		}
		switch name {
		case "text/plain", "text/*", "*/*":
			return "text/plain", ""
		case "application/json", "application/yaml":
			if params["g"] == zGroup && params["as"] == z.kind && slices.Contains(zVersions, params["v"]) {
				return name, params["v"]
			}
		}
	}
	return "", ""
}
