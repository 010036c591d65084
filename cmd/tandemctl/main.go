// SPDX-License-Identifier: Apache-2.0

// tandemctl shows what the eBPF programs of Tandem work with, straight from the
// kernel: no daemon has to run, and none is asked but to explain a decision.
package main

import "os"

func main() { os.Exit(newApp(os.Stdout, os.Stderr).run(os.Args[1:])) }
