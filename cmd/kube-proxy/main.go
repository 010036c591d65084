// SPDX-License-Identifier: Apache-2.0

// Kube-proxy is Tandem's drop-in for the Kubernetes network proxy of a node.
package main

import (
	"os"

	"k8s.io/component-base/cli"

	"github.com/tandem-proxy/tandem/cmd/kube-proxy/app"
)

func main() {
	os.Exit(cli.Run(app.NewCommand()))
}
