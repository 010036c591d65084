// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command vmrun runs a command under another kernel, in a virtual machine:
//
//	vmrun -kernel 6.1 -- uname -r
//	go test -p 1 -exec "vmrun -kernel 6.1 --" ./kernel/tc
//
// Its exit code is the command's, or 125 if the command did not finish.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/tandem-proxy/tandem/test/vm"
)

func main() {
	vm.Main()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	code, err := run(ctx)
	if err != nil {
		fmt.Fprintf(os.Stderr, "vmrun: %v\n", err)
		os.Exit(125)
	}
	os.Exit(code)
}

// passedOn are prefixes of the environment variables that tests read.
var passedOn = []string{"TANDEM_", "GOCOVERDIR=", "GODEBUG=", "GOTRACEBACK=", "GORACE="}

func run(ctx context.Context) (int, error) {
	var names []string
	for _, k := range vm.Kernels {
		names = append(names, k.Name)
	}
	kernel := flag.String("kernel", "6.1", "the kernel: "+strings.Join(names, ", "))
	memory := flag.Int("memory", 0, "MiB of memory, half of which files may fill (default 1024)")
	cpus := flag.Int("cpus", 0, "number of CPUs (default 1)")
	timeout := flag.Duration("timeout", 0, "when to give up (default: a minute after -test.timeout, or 10m)")
	update := flag.Bool("update", false, "fetch the kernel and the guest's programs anew")
	verbose := flag.Bool("v", false, "tell what ran, and how long, on standard error")
	var o vm.Options
	flag.Func("env", "`NAME=VALUE` to set; may be given several times", func(v string) error {
		o.Env = append(o.Env, v)
		return nil
	})
	flag.Func("file", "`path` of a file or directory to have in the guest as well; may be given several times", func(v string) error {
		o.Files = append(o.Files, v)
		return nil
	})
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "Usage: vmrun [flags] -- command [arguments]")
		flag.PrintDefaults()
	}
	flag.Parse()

	var err error
	if o.Kernel, err = vm.Find(*kernel); err != nil {
		return 0, err
	}
	cache, err := vm.OpenCache()
	if err != nil {
		return 0, err
	}
	if *update {
		if err := cache.Fetch(ctx, o.Kernel, true); err != nil {
			return 0, err
		}
		if flag.NArg() == 0 {
			return 0, nil
		}
	}
	if flag.NArg() == 0 {
		flag.Usage()
		return 0, fmt.Errorf("no command is given")
	}
	for _, kv := range os.Environ() {
		for _, prefix := range passedOn {
			if strings.HasPrefix(kv, prefix) {
				o.Env = append(o.Env, kv)
			}
		}
	}
	if o.Init, err = os.Executable(); err != nil {
		return 0, err
	}
	if o.Dir, err = os.Getwd(); err != nil {
		return 0, err
	}
	o.Args, o.Output, o.Memory, o.CPUs, o.Timeout = flag.Args(), os.Stdout, *memory, *cpus, *timeout
	began := time.Now()
	r, err := cache.Run(ctx, o)
	if err != nil {
		return 0, err
	}
	if *verbose {
		fmt.Fprintf(os.Stderr, "vmrun: Linux %s booted in %.1f s, ran for %.1f s; %.1f s in all\n",
			r.Release, r.Boot.Seconds(), r.Run.Seconds(), time.Since(began).Seconds())
	}
	return r.Code, nil
}
