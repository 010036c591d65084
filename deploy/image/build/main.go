// SPDX-License-Identifier: Apache-2.0

// Command build makes the image without a daemon, for one platform or several, and prints its digest. 'make image' runs it in the root of the
// sources.
package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-proxy/tandem/deploy/image"
)

type options struct {
	name, version, platforms, ldflags, output, root string
	written                                         time.Time
}

func main() {
	var o options
	flag.StringVar(&o.name, "name", "", "name of the image, with its tag")
	flag.StringVar(&o.version, "version", "", "version of the programs")
	flag.StringVar(&o.platforms, "platforms", "", "platforms, separated by commas: linux/amd64,linux/arm64")
	flag.StringVar(&o.ldflags, "ldflags", "-s -w", "flags of the linker for our programs")
	flag.StringVar(&o.output, "o", "image.tar", "archive to be written: an OCI image layout, which docker load and ctr images import read too; the SBOM of each platform is beside it")
	flag.StringVar(&o.root, "root", "", "write the file system of one platform into this directory, and no archive")
	flag.Parse()
	if err := o.run(); err != nil {
		fmt.Fprintln(os.Stderr, "build the image:", err)
		os.Exit(1)
	}
}

func (o *options) run() (err error) {
	if o.written, err = epoch(); err != nil {
		return err
	}
	archs, err := architectures(o.platforms)
	if err != nil {
		return err
	}
	if o.root != "" {
		if len(archs) > 1 {
			return errors.New("-root is for one platform")
		}
		if err := image.RootFS(".", o.root, archs[0]); err != nil {
			return err
		}
		return image.BuildPrograms(".", filepath.Join(o.root, image.Programs), archs[0], "-ldflags="+o.ldflags)
	}
	work, err := os.MkdirTemp("", "image-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	named := image.Named{Name: o.name}
	for _, arch := range archs {
		im, err := o.platform(filepath.Join(work, arch), arch)
		if err != nil {
			return err
		}
		named.Images = append(named.Images, im)
	}
	return o.save(named)
}

// epoch is when files were written, by the convention of reproducible builds.
func epoch() (time.Time, error) {
	text := cmp.Or(os.Getenv("SOURCE_DATE_EPOCH"), "0")
	seconds, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		err = fmt.Errorf("SOURCE_DATE_EPOCH=%.32q is not a number of seconds", text)
	}
	return time.Unix(seconds, 0), err
}

func architectures(platforms string) (list []string, err error) {
	for platform := range strings.SplitSeq(platforms, ",") {
		arch, ok := strings.CutPrefix(platform, "linux/")
		if !ok || arch == "" || strings.Contains(arch, "/") {
			return nil, fmt.Errorf("platform %q is not linux/ and an architecture by Go's name", platform)
		}
		list = append(list, arch)
	}
	return list, nil
}

// platform makes the layers of a platform, and its SBOM.
func (o *options) platform(dir, arch string) (im image.Image, err error) {
	root, programs := filepath.Join(dir, "root"), filepath.Join(dir, "programs")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return im, err
	}
	fmt.Fprintf(os.Stderr, "linux/%s: packages of Debian\n", arch)
	if err := image.RootFS(".", root, arch); err != nil {
		return im, err
	}
	fmt.Fprintf(os.Stderr, "linux/%s: programs\n", arch)
	if err := image.BuildPrograms(".", programs, arch, "-ldflags="+o.ldflags); err != nil {
		return im, err
	}
	base, err := image.NewLayer(filepath.Join(dir, "root.tar"), map[string]string{"": root}, o.written, true)
	if err != nil {
		return im, err
	}
	top, err := image.NewLayer(filepath.Join(dir, "programs.tar"), map[string]string{image.Programs: programs}, o.written, true)
	if err != nil {
		return im, err
	}
	im = image.Image{Arch: arch, Entrypoint: []string{"/" + image.Programs + "/kube-proxy"}, Layers: []image.Layer{base, top}, Created: o.written}
	im.Labels = map[string]string{
		"org.opencontainers.image.title": "Tandem", "org.opencontainers.image.version": o.version, "org.opencontainers.image.licenses": "Apache-2.0",
		"org.opencontainers.image.source": "https://github.com/tandem-proxy/tandem",
	}
	im.SBOM, err = image.SBOM("tandem-kube-proxy-"+arch, o.version, o.written, root, programs)
	return im, err
}

// save writes the archive and SBOMs, and prints the digest.
func (o *options) save(named image.Named) (err error) {
	if err := os.MkdirAll(filepath.Dir(o.output), 0o755); err != nil {
		return err
	}
	for _, im := range named.Images {
		if err := os.WriteFile(strings.TrimSuffix(o.output, ".tar")+"-"+im.Arch+".spdx.json", im.SBOM, 0o644); err != nil {
			return err
		}
	}
	f, err := os.Create(o.output)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	digests, err := image.Save(f, named)
	if err != nil {
		return err
	}
	for _, im := range named.Images {
		fmt.Fprintf(os.Stderr, "linux/%s: %.1f MiB compressed\n", im.Arch, float64(im.Size())/(1<<20))
	}
	fmt.Fprintf(os.Stderr, "%s has %s, by the digest\n", o.output, o.name)
	fmt.Println(digests[0])
	return nil
}
