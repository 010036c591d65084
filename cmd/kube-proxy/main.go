// SPDX-License-Identifier: Apache-2.0

// Kube-proxy is Tandem's drop-in for the Kubernetes network proxy of a node.
package main

import (
	"os"
	"path/filepath"

	"k8s.io/component-base/cli"

	"github.com/tandem-proxy/tandem/cmd/kube-proxy/app"
	"github.com/tandem-proxy/tandem/cmd/kube-proxy/klipperlb"
)

func main() {
	// K3s starts pods of its ServiceLB by variables alone. klipper-lb's own program is called entry.
	isEntry := filepath.Base(os.Args[0]) == "entry"
	if isEntry || len(os.Args) == 1 && klipperlb.Wanted(os.LookupEnv) || len(os.Args) == 2 && os.Args[1] == "klipper-lb" {
		os.Exit(klipperlb.Main())
	}
	os.Exit(cli.Run(app.NewCommand()))
}
