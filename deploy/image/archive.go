// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// Media types of the OCI image specification, 1.1.
const (
	mediaIndex    = "application/vnd.oci.image.index.v1+json"
	mediaManifest = "application/vnd.oci.image.manifest.v1+json"
	mediaConfig   = "application/vnd.oci.image.config.v1+json"
	mediaLayer    = "application/vnd.oci.image.layer.v1.tar"
	mediaInToto   = "application/vnd.in-toto+json"
)

// Image is one of a platform.
type Image struct {
	// Arch is the architecture by Go's name.
	Arch       string
	Entrypoint []string
	Layers     []Layer // the lowest first
	Created    time.Time
	// Labels are those of the image.
	Labels map[string]string
	// SBOM is an SPDX document, which becomes an attestation as BuildKit makes it; nil for none.
	SBOM []byte
}

// Named is an image by its name, for one platform or several.
type Named struct {
	Name   string
	Images []Image
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Config        descriptor   `json:"config"`
	Layers        []descriptor `json:"layers"`
}

type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []descriptor `json:"manifests"`
}

// dockerEntry is an image of docker save's own format, which earlier tools read: of each name the first platform.
type dockerEntry struct {
	Config           string
	RepoTags, Layers []string
}

// archive is one that is written.
type archive struct {
	w       *tar.Writer
	written map[string]bool // digests
}

// Save writes images as an OCI image layout in an archive, which docker save's format is beside, and returns their digests. A layer that
// several images have is written once.
func Save(out io.Writer, list ...Named) (digests []string, err error) {
	a := archive{tar.NewWriter(out), map[string]bool{}}
	if err := a.json("oci-layout", map[string]string{"imageLayoutVersion": "1.0.0"}); err != nil {
		return nil, err
	}
	top := index{SchemaVersion: 2, MediaType: mediaIndex}
	var entries []dockerEntry
	for _, named := range list {
		d, entry, err := a.named(named)
		if err != nil {
			return nil, fmt.Errorf("write image %s: %w", named.Name, err)
		}
		digests = append(digests, d.Digest)
		top.Manifests, entries = append(top.Manifests, d), append(entries, entry)
	}
	if err := a.json("index.json", top); err != nil {
		return nil, err
	}
	if err := a.json("manifest.json", entries); err != nil {
		return nil, err
	}
	return digests, a.w.Close()
}

// named writes an image, as an index unless there is one manifest alone.
func (a *archive) named(n Named) (d descriptor, entry dockerEntry, err error) {
	all := index{SchemaVersion: 2, MediaType: mediaIndex}
	var attestations []descriptor
	for i := range n.Images {
		d, config, err := a.image(&n.Images[i])
		if err != nil {
			return d, entry, err
		}
		if all.Manifests = append(all.Manifests, d); i == 0 {
			entry = dockerEntry{Config: blob(config), RepoTags: []string{n.Name}}
			for _, l := range n.Images[i].Layers {
				entry.Layers = append(entry.Layers, blob(l.descriptor.Digest))
			}
		}
		if n.Images[i].SBOM != nil {
			at, err := a.attest(d, n.Images[i].SBOM)
			if err != nil {
				return d, entry, err
			}
			attestations = append(attestations, at)
		}
	}
	if all.Manifests = append(all.Manifests, attestations...); len(all.Manifests) == 1 {
		d = all.Manifests[0]
	} else if d, err = a.blobJSON(mediaIndex, all); err != nil {
		return d, entry, err
	}
	_, tag, _ := strings.Cut(n.Name[strings.LastIndexByte(n.Name, '/')+1:], ":")
	d.Annotations = map[string]string{"io.containerd.image.name": n.Name, "org.opencontainers.image.ref.name": tag}
	return d, entry, nil
}

// image writes the manifest of a platform.
func (a *archive) image(im *Image) (d descriptor, config string, err error) {
	m := manifest{SchemaVersion: 2, MediaType: mediaManifest}
	var digests []string
	for _, l := range im.Layers {
		if err := a.layer(l); err != nil {
			return d, "", err
		}
		digests, m.Layers = append(digests, l.uncompressed), append(m.Layers, l.descriptor)
	}
	settings := map[string]any{"Entrypoint": im.Entrypoint, "Env": []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}}
	if im.Labels != nil {
		settings["Labels"] = im.Labels
	}
	m.Config, err = a.blobJSON(mediaConfig, map[string]any{
		"architecture": im.Arch, "os": "linux", "created": im.Created.UTC().Format(time.RFC3339),
		"rootfs": map[string]any{"type": "layers", "diff_ids": digests}, "config": settings,
	})
	if err != nil {
		return d, "", err
	}
	d, err = a.blobJSON(mediaManifest, m)
	d.Platform = &platform{im.Arch, "linux"}
	return d, m.Config.Digest, err
}

// attest writes the manifest of an SBOM, of no platform, which names the one that it is about.
func (a *archive) attest(of descriptor, sbom []byte) (d descriptor, err error) {
	statement, err := a.blobJSON(mediaInToto, map[string]any{
		"_type": "https://in-toto.io/Statement/v0.1", "predicateType": predicateSPDX, "predicate": json.RawMessage(sbom),
		"subject": []any{map[string]any{"name": "_", "digest": map[string]string{"sha256": strings.TrimPrefix(of.Digest, "sha256:")}}},
	})
	if err != nil {
		return d, err
	}
	m := manifest{SchemaVersion: 2, MediaType: mediaManifest, Layers: []descriptor{statement}}
	m.Layers[0].Annotations = map[string]string{"in-toto.io/predicate-type": predicateSPDX}
	m.Config, err = a.blobJSON(mediaConfig, map[string]any{
		"architecture": "unknown", "os": "unknown", "config": map[string]any{},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{statement.Digest}},
	})
	if err != nil {
		return d, err
	}
	d, err = a.blobJSON(mediaManifest, m)
	d.Platform = &platform{"unknown", "unknown"}
	d.Annotations = map[string]string{"vnd.docker.reference.type": "attestation-manifest", "vnd.docker.reference.digest": of.Digest}
	return d, err
}

const predicateSPDX = "https://spdx.dev/Document"

func blob(digest string) string { return "blobs/" + strings.Replace(digest, ":", "/", 1) }

func (a *archive) layer(l Layer) error {
	f, err := os.Open(l.path)
	if err != nil {
		return err
	}
	defer f.Close()
	return a.blob(l.descriptor.Digest, l.descriptor.Size, f)
}

func (a *archive) blobJSON(media string, content any) (descriptor, error) {
	text, err := json.Marshal(content)
	if err != nil {
		return descriptor{}, err
	}
	d := descriptor{MediaType: media, Digest: fmt.Sprintf("sha256:%x", sha256.Sum256(text)), Size: int64(len(text))}
	return d, a.blob(d.Digest, d.Size, bytes.NewReader(text))
}

func (a *archive) blob(digest string, size int64, content io.Reader) error {
	if a.written[digest] {
		return nil
	}
	a.written[digest] = true
	return a.file(blob(digest), size, content)
}

func (a *archive) json(name string, content any) error {
	text, err := json.Marshal(content)
	if err != nil {
		return err
	}
	return a.file(name, int64(len(text)), bytes.NewReader(text))
}

func (a *archive) file(name string, size int64, content io.Reader) error {
	if err := a.w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: size}); err != nil {
		return err
	}
	_, err := io.Copy(a.w, content)
	return err
}

// Size is that of the layers in the archive, in bytes.
func (im *Image) Size() (n int64) {
	for _, l := range im.Layers {
		n += l.descriptor.Size
	}
	return n
}
