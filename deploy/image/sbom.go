// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bufio"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// component is a part of an image.
type component struct {
	kind          string // deb or golang
	name, version string
	arch          string // of a package of Debian
}

// purl is the package URL, github.com/package-url/purl-spec.
func (c component) purl() string {
	escape := func(text string) string { return strings.ReplaceAll(url.PathEscape(text), "+", "%2B") }
	if c.kind == "deb" {
		return fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s", c.name, escape(c.version), c.arch)
	}
	return fmt.Sprintf("pkg:golang/%s@%s", c.name, escape(c.version))
}

// SBOM is an SPDX 2.3 document of the packages of Debian and the modules of Go in an image, by what its files say of themselves.
func SBOM(name, version string, created time.Time, root, programs string) ([]byte, error) {
	debs, err := debsOf(root)
	if err != nil {
		return nil, err
	}
	modules, err := modulesOf(programs, version)
	if err != nil {
		return nil, err
	}
	all := append(debs, modules...)
	slices.SortFunc(all, func(a, b component) int { return strings.Compare(a.purl(), b.purl()) })
	all = slices.Compact(all)

	type reference struct {
		Category string `json:"referenceCategory"`
		Type     string `json:"referenceType"`
		Locator  string `json:"referenceLocator"`
	}
	type part struct {
		ID         string      `json:"SPDXID"`
		Name       string      `json:"name"`
		Version    string      `json:"versionInfo"`
		Location   string      `json:"downloadLocation"`
		Analyzed   bool        `json:"filesAnalyzed"`
		References []reference `json:"externalRefs,omitempty"`
	}
	type relationship struct {
		From string `json:"spdxElementId"`
		Type string `json:"relationshipType"`
		To   string `json:"relatedSpdxElement"`
	}
	const document, image = "SPDXRef-DOCUMENT", "SPDXRef-Image"
	parts := []part{{ID: image, Name: name, Version: version, Location: "NOASSERTION"}}
	relations := []relationship{{document, "DESCRIBES", image}}
	for _, c := range all {
		p := part{ID: "SPDXRef-" + notInID.ReplaceAllString(c.kind+"-"+c.name+"-"+c.version, "-"), Name: c.name, Version: c.version, Location: "NOASSERTION"}
		p.References = []reference{{"PACKAGE-MANAGER", "purl", c.purl()}}
		parts, relations = append(parts, p), append(relations, relationship{image, "CONTAINS", p.ID})
	}
	return json.MarshalIndent(map[string]any{
		"spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": document, "name": name,
		"documentNamespace": "https://github.com/tandem-proxy/tandem/sbom/" + url.PathEscape(name+"-"+version),
		"creationInfo":      map[string]any{"created": created.UTC().Format(time.RFC3339), "creators": []string{"Tool: tandem-image"}},
		"packages":          parts, "relationships": relations,
	}, "", "  ")
}

var notInID = regexp.MustCompile(`[^A-Za-z0-9.-]+`)

// debsOf reads the control files that RootFS leaves.
func debsOf(root string) (list []component, err error) {
	files, err := filepath.Glob(filepath.Join(root, "var/lib/dpkg/status.d/*"))
	if err == nil && len(files) == 0 {
		err = fmt.Errorf("%s has no packages of Debian", root)
	}
	for _, file := range files {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		fields := map[string]string{}
		for lines := bufio.NewScanner(f); lines.Scan(); {
			if key, value, ok := strings.Cut(lines.Text(), ": "); ok {
				fields[key] = value
			}
		}
		_ = f.Close()
		list = append(list, component{"deb", fields["Package"], fields["Version"], fields["Architecture"]})
	}
	return list, err
}

// modulesOf reads what the linker left in programs.
func modulesOf(programs, version string) (list []component, err error) {
	err = filepath.WalkDir(programs, func(file string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := buildinfo.ReadFile(file)
		if err != nil {
			return fmt.Errorf("read the modules of %s: %w", file, err)
		}
		list = append(list, component{kind: "golang", name: info.Main.Path, version: version}, component{kind: "golang", name: "stdlib", version: strings.TrimPrefix(info.GoVersion, "go")})
		for _, m := range info.Deps {
			list = append(list, moduleOf(m))
		}
		return nil
	})
	if err == nil && len(list) == 0 {
		err = errors.New("there are no programs")
	}
	return list, err
}

func moduleOf(m *debug.Module) component {
	if m.Replace != nil && m.Replace.Version != "" {
		m = m.Replace
	}
	return component{kind: "golang", name: m.Path, version: m.Version}
}
